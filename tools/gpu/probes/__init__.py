"""What `tools.gpu.session` measures besides the checks and the bench, each a module that prints
lines of JSON."""
