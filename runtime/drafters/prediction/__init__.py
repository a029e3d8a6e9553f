"""Layers of a checkpoint that predict further tokens (MTP): their names, and how they open."""
