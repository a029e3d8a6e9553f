"""Experts on a CPU, in kernels that numba compiles."""
