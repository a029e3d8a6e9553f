"""The model's own layers around the experts in compiled code: attention, norms, router, and a
whole token."""
