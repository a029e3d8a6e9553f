"""Searches the combination of policies that is fastest on a trace and a machine."""
