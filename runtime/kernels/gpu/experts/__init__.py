"""Gated experts in Triton kernels."""
