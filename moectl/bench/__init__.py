"""A live and a simulated bench of many settings; both resume after a stop."""
