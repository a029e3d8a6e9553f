"""Commands of the chapter Store: what is kept, for reading and for other programs."""
