"""Does a test notice when one thing of the code changes? `python -m tools.mutation.mutate`."""
