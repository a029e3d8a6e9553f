"""Routing traces: recorded, synthetic or read from a file, and the curves measured on them."""
