"""What is observed: run something, measure, hand arrays to artifacts."""
