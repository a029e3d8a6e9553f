"""A checkpoint's files: where they are, what they hold, and how an expert is read from them."""
