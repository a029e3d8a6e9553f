"""The terminal of a command: progress, messages, interrupts, exit codes."""
