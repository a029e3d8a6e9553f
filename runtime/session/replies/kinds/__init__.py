"""The kinds of replies, one a file, registered where it is imported."""
