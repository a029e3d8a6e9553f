"""Replays a trace through the live run's controller, on virtual time."""
