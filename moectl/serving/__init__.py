"""`moectl serve`: an OpenAI-compatible endpoint over one session, and a page to chat and to see
what it costs."""
