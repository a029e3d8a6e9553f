"""Studies for the pages of the project, which a user's work does not need: moectl runs them from a
clone."""
