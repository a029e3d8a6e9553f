"""Benchmarks of speed and memory, whose figures docs/lab/performance.md and its neighbours quote."""
