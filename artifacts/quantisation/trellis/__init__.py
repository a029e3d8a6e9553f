"""Trellis codes: their table, the search for them, and the products that decode them."""
