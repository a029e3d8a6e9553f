"""Kernels for a GPU, written in Triton."""
