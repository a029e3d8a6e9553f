"""Commands of the chapter Start: run a model, or see what it takes."""
