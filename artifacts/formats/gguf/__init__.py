"""The block formats of GGUF files, and the header that names them."""
