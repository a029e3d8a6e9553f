"""`moectl serve`: a session behind an OpenAI-compatible endpoint, and a page that shows what it does."""
