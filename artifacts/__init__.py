"""Known facts and pure functions. No model, no printing."""
