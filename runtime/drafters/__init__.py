"""Drafters propose the next tokens of a request, which one pass of the model verifies together."""
