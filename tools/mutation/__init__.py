"""Mutation tests of the code: `python -m tools.mutation.mutate`."""
