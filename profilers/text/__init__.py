"""Documents, token sequences and padded batches, from every source of text."""
