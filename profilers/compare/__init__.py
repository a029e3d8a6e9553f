"""Compares runs: presets, other programs, tasks, a prediction with its run."""
