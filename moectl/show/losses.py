"""A loss of perplexity in words: with its standard error, or that so few tokens do not tell it from
none."""

# tokens that are scored, below which no preset is recommended by what it loses
LEAST_SCORED = 2_000


def is_distinguishable(loss: float, error: float | None) -> bool:
    """Return whether a loss is more than two of its standard errors from none; yes where its error
    is not known."""
    return error is None or abs(loss) > 2 * error


def loss_words(loss: float, error: float | None, *, digits: int = 2) -> str:
    """Return a share of perplexity in per cent, negative for a gain, with its standard error."""
    per_cent = f"{100 * loss:.{digits}f} %"
    if error is None:
        return per_cent
    if is_distinguishable(loss, error):
        return f"{per_cent} (+- {100 * error:.{digits}f})"
    return f"not distinguishable ({per_cent} +- {100 * error:.{digits}f})"
