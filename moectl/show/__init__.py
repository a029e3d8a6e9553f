"""Tables, heatmaps, charts and picture files, made from arrays."""
