"""Whole models, written for other programs."""
