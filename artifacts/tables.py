"""Results as the tables of a notebook: HTML, Arrow, pandas."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, TypeVar

from markupsafe import Markup

from artifacts.errors import BadUsage

if TYPE_CHECKING:
    import pandas
    import pyarrow


class Result(Protocol):
    """A result with a row for tables."""

    def row(self) -> dict[str, object]:
        """Return its values by the names of columns."""


Kind = TypeVar("Kind", bound=Result)


class Results(list[Kind]):
    """Results of one kind, which a notebook shows as a table."""

    def to_arrow(self) -> "pyarrow.Table":
        """Return the results as an Arrow table, a row each."""
        import pyarrow

        return pyarrow.Table.from_pylist([each.row() for each in self])

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the results as a data frame, a row each. Raises BadUsage without pandas."""
        if find_spec("pandas") is None:
            raise BadUsage("pandas is not installed: pip install pandas, or take to_arrow()")
        return self.to_arrow().to_pandas()

    def _repr_html_(self) -> str:
        rows = [each.row() for each in self]
        return html_table(rows[0] if rows else (), (row.values() for row in rows))


class Receipt(dict[str, object]):
    """What is in force by name. A notebook shows it as a table, without what is empty."""

    def _repr_html_(self) -> str:
        return html_table(("", ""), ((name, fact) for name, fact in _flat(self) if fact))


def html_table(names: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table with these names of columns, escaped."""
    cells = [_cells("<th>{}</th>", names)] + [_cells("<td>{}</td>", row) for row in rows]
    return f"<table>{''.join(cells)}</table>"


def _cells(form: str, values: Iterable[object]) -> str:
    cells = [Markup(form).format(_shown(value)) for value in values]
    return f"<tr>{''.join(cells)}</tr>"


def _flat(facts: Mapping[str, object], before: str = "") -> Iterable[tuple[str, object]]:
    for name, fact in facts.items():
        if isinstance(fact, Mapping):
            yield from _flat(fact, f"{before}{name}.")
        else:
            yield f"{before}{name}", fact


def _shown(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.4g}"
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return ", ".join(map(str, value)) if is_list else value
