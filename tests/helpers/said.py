"""What a command said on stderr."""


def problems(err: str) -> str:
    """The text without the lines in which `moectl run` says what it loads and which preset it chose."""
    return "".join(line for line in err.splitlines(keepends=True) if not line.startswith(("Loading ", "Preset ")))
