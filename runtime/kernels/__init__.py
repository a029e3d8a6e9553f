"""Products, norms, attention and gated experts in compiled code: numbers and addresses in, arrays
out."""
