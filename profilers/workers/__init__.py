"""Processes of this machine, or a Ray cluster, that do tasks: start, retry, report."""
