"""Figures of papers beside ours, from replays on virtual time, with assumptions and
disagreements."""
