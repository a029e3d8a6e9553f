"""Helpers that every room needs and no room owns: atomic file writes, untrusted input, name
suggestions, compiled loops."""
