"""Links that bring bytes from the slow tier into a slot: from disk, over CUDA, emulated, one link
per device."""
