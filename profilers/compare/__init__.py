"""Compares runs: presets, other programs, precisions, substitutes, tasks, a prediction with its
run."""
