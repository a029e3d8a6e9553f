"""Parts that commands share: opening models and traces, progress, exit codes."""
