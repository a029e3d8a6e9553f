"""Charts as SVG: scales and axes, lines, bars, heatmaps and scatter plots, and files of them."""
