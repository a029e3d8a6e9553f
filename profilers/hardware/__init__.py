"""Measures what a model costs on this machine: the parts of a pass, loads, policies."""
