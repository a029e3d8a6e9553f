"""The model's own layers around the experts in Triton kernels: attention, norms, router."""
