"""`moectl generate`: the prompts of a file answered in batches, into a file that a stopped command
goes on with."""
