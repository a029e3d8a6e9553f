"""Splits of experts during a run: solved anew as the hit rates change."""
