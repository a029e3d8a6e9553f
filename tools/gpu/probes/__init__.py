"""Probes: the measurements of `tools.gpu.session` besides the checks and the bench, each a module
that prints lines of JSON."""
