"""Draws the packages, their rooms and the imports between them as one SVG picture, legible on light
and dark pages."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from tools.docs.rooms import WITHOUT_TORCH

Arrows = Mapping[str, set[str]]

_WINGS = {"runtime": (WITHOUT_TORCH, "decides: imports no torch", "moves and computes")}
"""Packages with two wings: the rooms on the left, and what the picture says of the left and of the
right."""

_TEXT = {
    "moectl": "what a person sees",
    "profilers": "what is observed",
    "runtime": "a forward pass, live or simulated",
    "artifacts": "what is known",
}
_WIDTH = 900
_MARGIN = 20
_ROW = 62
_BOX = 30
_PAD = 14
_LETTER = 8.2  # pixels of a letter of a room's name

_STYLE = """
text { font: 14px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 16px } .said { fill: #57606a; font-size: 12.5px }
.package { fill: #f6f8fa; stroke: #d0d7de } .room { fill: #fff; stroke: #6e7781 }
.wing { fill: none; stroke: #d0d7de; stroke-dasharray: 5 4 }
path { fill: none; stroke: #8c959f; stroke-width: 1.2 } .down { stroke: #0969da; stroke-width: 2 }
#head path { fill: #8c959f; stroke: none } #big path { fill: #0969da; stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .said { fill: #9198a1 } .package { fill: #151b23; stroke: #3d444d }
  .room { fill: #0d1117; stroke: #9198a1 } .wing { stroke: #3d444d } path { stroke: #656c76 }
  .down { stroke: #4493f8 } #head path { fill: #656c76 } #big path { fill: #4493f8 }
}"""
_HEADS = (
    '<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0,0 L8,4 L0,8 z"/></marker>'
)


def drawn(packages: Mapping[str, Arrows]) -> str:
    """The picture; `packages` from the innermost outwards, each with the imports between its
    rooms."""
    parts = []
    top = _MARGIN
    frames = []
    for package in reversed(packages):
        lines, height = _package(package, packages[package], top)
        frames.append((top, top + height))
        parts += lines
        top += height + 34
    for (_, bottom), (next_top, _) in pairwise(frames):
        parts.append(
            f'<path class="down" marker-end="url(#big)" d="M{_WIDTH / 2},{bottom} V{next_top}"/>'
        )
    heads = "".join(_HEADS.format(name=name) for name in ("head", "big"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top - 14}" role="img" '
        f'aria-label="Packages and rooms; an arrow is an import">\n<style>{_STYLE}\n</style>\n'
        f"<defs>{heads}</defs>\n" + "\n".join(parts) + "\n</svg>\n"
    )


@dataclass(frozen=True, slots=True)
class _Wing:
    """Rooms that stand together between two borders, by level; `said` is what the picture says of
    them."""

    levels: list[list[str]]
    left: float
    right: float
    said: str = ""

    def places(self, lowest: float) -> dict[str, tuple[float, float]]:
        """The middle of each room and its upper border; the first level stands at `lowest`."""
        found = {}
        for level, names in enumerate(self.levels):
            step = (self.right - self.left) / len(names)
            for i, room in enumerate(names):
                found[room] = (self.left + (i + 0.5) * step, lowest - level * _ROW)
        return found


def _package(package: str, arrows: Arrows, top: float) -> tuple[list[str], float]:
    """The frame of one package with its rooms and arrows, and its height."""
    wings = _wings(package, arrows)
    above = 44 + (24 if wings[0].said else 0)
    rows = max(len(wing.levels) for wing in wings)
    height = above + rows * _ROW - 14
    lines = [
        (
            f'<rect class="package" x="{_MARGIN}" y="{top}" width="{_WIDTH - 2 * _MARGIN}" '
            f'height="{height}" rx="8"/>'
        ),
        f'<text class="title" x="{_MARGIN + _PAD}" y="{top + 26}">{package}'
        f'<tspan class="said" dx="10" style="font-weight:400">{_TEXT[package]}</tspan></text>',
    ]
    places: dict[str, tuple[float, float]] = {}
    for wing in wings:
        places |= wing.places(top + above + (rows - 1) * _ROW)
        if wing.said:
            size = f'width="{wing.right - wing.left}" height="{height - 44}"'
            lines.append(f'<rect class="wing" x="{wing.left}" y="{top + 36}" {size} rx="6"/>')
            lines.append(
                f'<text class="said" x="{wing.left + 12}" y="{top + 54}">{wing.said}</text>'
            )
    lines += [
        _arrow(places[a], places[b], a, b) for a in arrows for b in sorted(_direct(arrows, a))
    ]
    return [*lines, *(_room(name, *place) for name, place in places.items())], height


def _wings(package: str, arrows: Arrows) -> list[_Wing]:
    if package not in _WINGS:
        return [_Wing(_levels(arrows, tuple(arrows)), _MARGIN, _WIDTH - _MARGIN)]
    first, said, also = _WINGS[package]
    others = tuple(room for room in arrows if room not in first)
    middle = _MARGIN + 0.4 * (_WIDTH - 2 * _MARGIN)
    left = _Wing(_levels(arrows, first), _MARGIN + _PAD, middle - 8, said)
    return [left, _Wing(_levels(arrows, others), middle + 8, _WIDTH - _MARGIN - _PAD, also)]


def _levels(arrows: Arrows, rooms: tuple[str, ...]) -> list[list[str]]:
    """Return rooms by the longest way down from them: rooms that import none of the others
    first."""
    depth: dict[str, int] = {}
    for room in rooms:
        depth[room] = 1 + max(
            (depth[other] for other in arrows[room] if other in depth), default=-1
        )
    return [
        [room for room in rooms if depth[room] == level] for level in range(max(depth.values()) + 1)
    ]


def _direct(arrows: Arrows, room: str) -> set[str]:
    """Return the rooms that a room imports and does not reach through another room that it
    imports."""
    beyond: set[str] = set()
    for other in arrows[room]:
        beyond |= _reached(arrows, other)
    return arrows[room] - beyond


def _reached(arrows: Arrows, room: str) -> set[str]:
    return set(arrows[room]).union(*(_reached(arrows, other) for other in arrows[room]))


def _half_width(name: str) -> float:
    return len(name) * _LETTER / 2 + 10


def _room(name: str, x: float, y: float) -> str:
    half = _half_width(name)
    box = (
        f'<rect class="room" x="{x - half:.0f}" y="{y}" width="{2 * half:.0f}" height="{_BOX}" '
        'rx="4"/>'
    )
    return f'{box}<text x="{x:.0f}" y="{y + 20}" text-anchor="middle">{name}</text>'


def _arrow(start: tuple[float, float], end: tuple[float, float], first: str, last: str) -> str:
    x1, y1 = start
    x2, y2 = end
    if y1 < y2:
        y1 += _BOX
        bend = (y2 - y1) / 2
        aside = 60 if x1 == x2 and y2 - y1 > _ROW else 0  # around the room between them
        curve = (
            f"{x1 + aside:.0f},{y1 + bend:.0f} {x2 + aside:.0f},{y2 - bend:.0f} {x2:.0f},{y2:.0f}"
        )
        line = f"M{x1:.0f},{y1:.0f} C{curve}"
    else:
        side = 1 if x2 > x1 else -1
        start_x = x1 + side * _half_width(first)
        end_x = x2 - side * _half_width(last)
        line = f"M{start_x:.0f},{y1 + _BOX / 2} L{end_x:.0f},{y2 + _BOX / 2}"
    return f'<path marker-end="url(#head)" d="{line}"/>'
