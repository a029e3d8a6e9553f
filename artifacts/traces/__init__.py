"""What routers said: recorded, drawn from dials or read from a file, and the curves counted in it."""
