"""A self-contained HTML page on one model of a store: text, charts, tables, and the query of
each."""
