"""What is known of experts from routing: use together, entropy, buddies, expert maps, predictors."""
