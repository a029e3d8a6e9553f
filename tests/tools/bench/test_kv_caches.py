"""Times of caches of keys and values."""

from moectl.bundled import demo_model
from tools.bench.decoding.kv_caches import rows


def test_every_cache_is_a_row() -> None:
    table = [row.split(" | ") for row in rows(demo_model(), prompt=32, rounds=1, tokens=1)]
    assert [(row[0], row[1]) for row in table] == [
        (f"| {experts}", f"`{cache}`")
        for experts in ("exact", "fused")
        for cache in ("auto", "int8", "int4")
    ]
    assert all(float(row[2]) > 0 for row in table)
    assert table[0][3] == table[3][3] == "1.00"
