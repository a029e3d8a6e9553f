"""How published checkpoints store a matrix in few bits: one file a format, with the formula that
turns its tensors into numbers."""
