"""Products with replicas of few bits, packed or in trellis codes."""
