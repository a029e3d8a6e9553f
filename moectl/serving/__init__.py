"""`moectl serve`: an OpenAI-compatible endpoint over one session, and a page that shows its cache
and link."""
