"""Helpers of several policies: matching of expert maps, activation matrices, background work."""
