"""Checks and benches for a machine with a GPU."""
