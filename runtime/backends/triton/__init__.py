"""Experts on a GPU, in Triton kernels."""
