"""What `tools.gpu.check` checks, a file a part of the runtime."""
