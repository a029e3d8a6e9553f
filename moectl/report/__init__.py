"""One self-contained page of what a store knows of a model: words, charts, tables, and the query of each."""
