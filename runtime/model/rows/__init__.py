"""Requests that share a pass: their keys, values and states, and attention to each one's own."""
