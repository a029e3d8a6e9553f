"""Replies of chat models, taken apart: text, reasoning and calls of tools."""
