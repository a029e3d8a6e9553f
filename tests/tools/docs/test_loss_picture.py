"""The picture of what experts lose in few bits is that of the tables in docs/lab/quantisation.md."""

from pathlib import Path

from moectl.charts.pictures import write_picture
from tools.docs.loss_picture import MODELS, PAGE, PICTURE, drawing, read


def test_the_picture_shows_the_tables_of_the_page(tmp_path: Path) -> None:
    """Else: `python -m tools.docs.loss_picture`, and look at it."""
    models = read(PAGE.read_text(encoding="utf-8"))
    assert all({"trellis", "refined"} <= {row.recipe for row in models[name]} for name in MODELS)
    write_picture(drawing(models), tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_bytes() == PICTURE.read_bytes()
