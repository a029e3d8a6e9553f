"""Picture files: valid SVG that shows its values, in the colours of a light and of a dark page."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from artifacts.errors import BadUsage
from moectl.charts.pictures import check_picture, write_picture
from moectl.charts.plots import Line, lines
from moectl.charts.scales import LEVELS, Frame, linear_scale, shade_of
from moectl.show.render import Heatmap, draw_heatmap

SVG = "{http://www.w3.org/2000/svg}"


def drawn(path: Path) -> ElementTree.Element:
    return ElementTree.parse(path).getroot()


def test_a_heatmap_has_a_shade_for_every_cell(tmp_path: Path) -> None:
    values = np.arange(12.0).reshape(3, 4)
    draw_heatmap(Heatmap("A title & more", values, "layers", "experts"), tmp_path / "out.svg")
    root = drawn(tmp_path / "out.svg")
    shades = {path.attrib["class"]: path.attrib["d"] for path in root.iter(f"{SVG}path")}
    assert shades.keys() == {f"s{shade_of(value, 11.0)}" for value in values.ravel()}
    assert shades["s0"] == "M0 0h1v1h-1z" and len(shades) == LEVELS
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"A title & more", "layers", "experts", "11"} <= set(texts)


def test_a_few_large_values_do_not_pale_the_others(tmp_path: Path) -> None:
    values = np.ones((4, 25))
    values[0, 0] = 1000.0
    draw_heatmap(Heatmap("T", values, "r", "c"), tmp_path / "out.svg")
    assert "1 or more" in (tmp_path / "out.svg").read_text()


def test_colours_are_literal_and_follow_the_page(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw_heatmap(Heatmap("T", np.eye(3), "r", "c"), tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert "var(" not in text and "@media (prefers-color-scheme: dark)" in text
    assert text == (tmp_path / "b.svg").read_text()


def test_named_lines_are_listed(tmp_path: Path) -> None:
    frame = Frame(right=90)
    x = linear_scale(1.0, name="x", **frame.across)
    y = linear_scale(2.0, name="y", **frame.upwards)
    named = [
        Line([(0, 0), (1, 2)], "strong", "up", has_dots=True),
        Line([(0, 1), (1, 1)], "quiet", is_dashed=True),
    ]
    write_picture(lines("T", named, x, y, frame, says="T"), tmp_path / "out.svg")
    root = drawn(tmp_path / "out.svg")
    first, second = root.iter(f"{SVG}polyline")
    assert first.attrib["points"] == "56.0,248.0 290.0,16.0" and "stroke-dasharray" in second.attrib
    assert len(list(root.iter(f"{SVG}circle"))) == 2
    assert [text.text for text in root.iter(f"{SVG}text")].count("up") == 1
    assert [text for _, text in x.ticks] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match=r"a picture is written as \.svg, not '\.png'"):
        check_picture(tmp_path / "out.png")
    check_picture(tmp_path / "out.svg")
