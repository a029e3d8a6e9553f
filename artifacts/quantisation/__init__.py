"""Experts at 1 to 8 bits: grids, packing, GPTQ, replica files, and the choice of bits for each
expert."""
