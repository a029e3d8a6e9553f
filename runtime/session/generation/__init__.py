"""Tokens after a prompt: options and sampling, requests alone and in batches, and their text."""
