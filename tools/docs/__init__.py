"""Generated pages and pictures of the documents."""
