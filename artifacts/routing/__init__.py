"""What routing traces reveal about experts: coactivation, entropy, similarity, buddies, expert
maps, predictors."""
