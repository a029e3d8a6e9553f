"""Observations: run something, measure, hand arrays to artifacts."""
