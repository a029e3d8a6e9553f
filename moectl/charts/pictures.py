"""Picture files of results: SVG whose colours follow the reader's light or dark page."""

import re
from importlib.resources import files
from pathlib import Path

from artifacts.common.files import check_writable, replacing
from artifacts.errors import BadUsage
from moectl.charts.scales import Drawing, template

_MARGIN = 14
_HEAD = 40
_FILE_STYLE = (
    "svg .title { text-anchor: start; font-size: 13px; font-weight: 600; } .paper { fill: "
    "var(--paper); }\n"
)


def check_picture(path: Path) -> None:
    """Raise BadUsage or BadInput, before the work, when a picture could not be written after it."""
    if path.suffix != ".svg":
        raise BadUsage(f"a picture is written as .svg, not {path.suffix or path.name!r}")
    check_writable(path)


def write_picture(drawing: Drawing, path: Path) -> None:
    """Write an SVG file that holds its title, background and colours; equal drawings give equal
    bytes."""
    text = template("file").render(
        drawing=drawing,
        style=_style(),
        width=drawing.width + 2 * _MARGIN,
        height=drawing.height + _HEAD + _MARGIN,
        margin=_MARGIN,
        head=_HEAD,
    )
    with replacing(path) as temporary:
        temporary.write_text(f"{text}\n", encoding="utf-8")


def _style() -> str:
    """`charts.css` with colours in place of its variables, which many programs that show SVG do not
    know."""
    text = files("moectl.charts").joinpath("charts.css").read_text(encoding="utf-8")
    palettes, _, rules = text.partition("/* marks */\n")
    light, dark = (
        dict(re.findall(r"(--\w+): ([^;]+);", one))
        for one in re.findall(r":root \{(.*?)\}", palettes, re.S)
    )
    return (
        f"{_coloured(rules + _FILE_STYLE, light)}@media (prefers-color-scheme: dark) {{\n"
        f"{_coloured(rules + _FILE_STYLE, light | dark)}}}\n"
    )


def _coloured(rules: str, colours: dict[str, str]) -> str:
    return re.sub(r"var\((--\w+)\)", lambda use: colours[use[1]], rules)
