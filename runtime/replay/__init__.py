"""A trace through the same controller on virtual time."""
