"""Drafters: they propose the next tokens, which one pass of the model then verifies."""
