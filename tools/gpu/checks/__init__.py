"""The checks of `tools.gpu.check`, one file for each part of the runtime."""
