"""Makes what the repository carries: the bundled model, checkpoints, traces, questions, golden counts."""
