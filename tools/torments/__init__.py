"""Everything that can go wrong, at random: `python -m tools.torments.torture`."""
