"""Links bring bytes from the slow tier into slots: from disk, over CUDA, emulated, or one link per device."""
