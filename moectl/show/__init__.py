"""Arrays in, tables and heatmaps out."""
