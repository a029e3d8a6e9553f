"""Runs side by side: presets, peers, precisions, stand-ins, tasks, a prediction beside the run."""
