"""Which combination of policies is fastest on a trace and a machine."""
