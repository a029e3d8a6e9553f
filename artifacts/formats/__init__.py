"""Formats in which published checkpoints store a matrix in few bits: one file per format, with the
formula that turns its tensors into numbers."""
