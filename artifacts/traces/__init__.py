"""Routing traces: recorded, synthetic or read from a file, and the curves and statistics measured
on them."""
