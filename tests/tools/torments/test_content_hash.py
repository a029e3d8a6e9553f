"""The digest of a run: equal for equal rows, whatever their order and the number of the run."""

import pyarrow as pa

from artifacts.store.store import Store
from tests.helpers.stores import run_info, traces
from tools.torments.content_hash import content_hash


def test_the_same_content_in_another_order_and_another_run_has_the_same_hash(tmp_path):
    rows = traces(3).set_column(4, "token", pa.array([1, 2, 3]))
    rows = rows.set_column(7, "predicted", pa.array([[1.0], None, [3.0]], pa.list_(pa.float32())))
    others = (
        rows.set_column(4, "token", pa.array([1, 2, 4])),
        rows.slice(0, 2),
        rows.drop_columns("predicted"),
    )
    with Store.open(tmp_path / "moe.duckdb") as store:
        first, same, *differing = (
            content_hash(store, store.write_run(run_info(), {"traces": table}))
            for table in (rows, rows.take([2, 0, 1]), *others)
        )
        command = content_hash(store, store.write_run(run_info("learn"), {"traces": rows}))
    assert first == same and len({first, command, *differing}) == 5
