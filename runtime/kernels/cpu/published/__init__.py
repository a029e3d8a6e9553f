"""Products with matrices in the formats of published checkpoints."""
