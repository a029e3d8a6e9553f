"""Runs text through a model and measures its routers: profiles, expert maps, predictors."""
