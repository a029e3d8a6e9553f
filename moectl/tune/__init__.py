"""The search for policies as a command: prepare, distribute, verify, show."""
