"""Packed integers: GPTQ, AWQ and compressed-tensors."""
