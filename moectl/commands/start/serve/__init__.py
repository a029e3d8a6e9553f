"""`moectl serve`."""
