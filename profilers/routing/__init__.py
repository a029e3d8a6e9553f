"""Runs text through a model and counts what the routers say: profiles, expert maps, predictors."""
