"""Drafters propose the next tokens of a request, several of which one pass of the model verifies."""
