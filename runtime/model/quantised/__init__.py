"""Matrices in the few bits in which the checkpoint publishes them: their tensors, their layout in
a slot, their products by torch."""
