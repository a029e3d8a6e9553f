"""What a command said on stderr."""


def problems(err: str) -> str:
    """The text from the first line about a problem on, without the progress that was told
    before."""
    lines = err.splitlines(keepends=True)
    first = next((number for number, line in enumerate(lines) if line.startswith("moectl: ")), 0)
    return "".join(lines[first:])
