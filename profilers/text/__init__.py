"""Documents, token sequences and padded batches from wherever text comes."""
