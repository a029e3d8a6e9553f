"""Models by name: on the Hugging Face hub, in its cache, and in the folders of other programs."""
