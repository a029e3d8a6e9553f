"""What tests share: small checkpoints, stores, corpora, a browser, a server, and Triton in a process of its own."""
