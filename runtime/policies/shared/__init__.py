"""What several policies share: matching of expert maps, activation matrices, background work."""
