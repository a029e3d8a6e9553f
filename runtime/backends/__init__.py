"""Computes a step's experts: by torch with the model's own bits, or in compiled code for a CPU or a
GPU."""
