"""A checkpoint opened without its experts, its experts readable one by one, and the model's own
arithmetic."""
