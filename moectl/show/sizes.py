"""Sizes as a reader wants them."""


def human_bytes(nbytes: float) -> str:
    """Bytes in binary units: 1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
