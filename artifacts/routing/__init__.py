"""Analyses of routing traces: coactivation, entropy, similarity, buddies, expert maps,
predictors."""
