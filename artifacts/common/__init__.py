"""What every room needs and no room owns: files that appear whole, text from strangers, did-you-mean, numba."""
