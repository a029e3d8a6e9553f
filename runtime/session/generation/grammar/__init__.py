"""Grammars that an answer must have, and the reasoning before it."""
