"""Papers' figures beside ours, on virtual time and synthetic traces, with what was assumed and where we disagree."""
