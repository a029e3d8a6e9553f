"""What is known: facts and pure functions. No model, no printing."""
