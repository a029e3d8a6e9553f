"""Lists of names on the command line."""


def names_in(text: str) -> list[str]:
    """Split names separated by commas; a comma inside a policy's parameters does not separate."""
    names: list[str] = []
    for piece in text.split(","):
        if names and "=" in piece and ":" not in piece:
            names[-1] += f",{piece.strip()}"
        else:
            names.append(piece.strip())
    return names
