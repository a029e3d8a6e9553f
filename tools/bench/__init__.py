"""Benchmarks of speed and memory, whose figures docs/performance.md and its neighbours quote."""
