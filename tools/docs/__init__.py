"""Pages and pictures of the documents that the program writes."""
