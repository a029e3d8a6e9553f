"""Picture files of results: SVG whose colours follow the reader's light or dark page."""

import re
from html import escape
from importlib.resources import files
from pathlib import Path

from artifacts.common.files import check_writable, replacing
from artifacts.errors import BadUsage
from moectl.charts.scales import Drawing

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
    width = drawing.width + 2 * _MARGIN
    height = drawing.height + _HEAD + _MARGIN
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(drawing.says)}">\n'
        f'<style>\n{_style()}</style>\n<rect class="paper" width="{width:g}" height="{height:g}" '
        f'rx="8"/>\n<text class="title" x="{_MARGIN}" y="25">{escape(drawing.title)}</text>\n<g '
        f'transform="translate({_MARGIN} {_HEAD})">{drawing.inside}</g>\n</svg>\n'
    )
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


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
