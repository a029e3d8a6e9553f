"""Experts at 1 to 4 bits: grids, packing, GPTQ, replica files, and which expert gets how many bits."""
