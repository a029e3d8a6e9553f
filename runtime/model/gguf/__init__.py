"""GGUF files: header, vocabulary, settings and tensors, as the model's own code needs them."""
