"""The bench of many settings, live and simulated, which resumes."""
