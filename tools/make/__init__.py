"""Makes what the repository carries: the bundled model, checkpoints, traces, golden counts."""
