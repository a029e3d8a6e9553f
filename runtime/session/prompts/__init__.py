"""Prompts as tokens, and chats by the model's own template."""
