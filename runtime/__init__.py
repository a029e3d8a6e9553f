"""What happens in a forward pass, live or simulated."""
