"""`moectl chat`: chat with a model, as `moectl run` does without a prompt."""

from moectl.commands.start.run import run as chat

__all__ = ["chat"]
