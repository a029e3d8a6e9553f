"""Scripts of the house: run them from the repository's root as `python -m tools.NAME`."""
