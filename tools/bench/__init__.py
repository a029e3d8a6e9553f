"""Speed and memory, measured in pairs: what docs/performance.md and its neighbours quote."""
