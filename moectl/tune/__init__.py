"""The search as a command: prepare, distribute, verify, tell."""
