"""Shared helpers of tests: small checkpoints, stores, corpora, a browser, a server, and Triton in
its own process."""
