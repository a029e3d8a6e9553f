"""The tables of a bench: ratios where times mean nothing by themselves, exact rows apart, added
ones marked."""

import pytest

from artifacts.shape import Shape
from moectl.bench.ledger import LIVE, PEER, SIMULATED, BenchRow
from moectl.bench.other_tools import IMPORTED
from moectl.bench.sheets import sheets
from moectl.bench.table import Benched
from moectl.show.grounds import Grounds, measured, simulated
from moectl.show.render import Sheet

SHAPE = Shape(8, 32, 4, 24_576)
MACHINE = "rtx3090-pcie4"


def row(
    preset: str,
    tpot_ms: float,
    *,
    budget: str = "25%",
    mode: str = LIVE,
    kl: float | None = 0.0,
    **rest,
) -> BenchRow:
    quality = {} if kl is None else {"kl": kl, "perplexity_ratio": 1 + kl, "top1_agreement": 1.0}
    counted = {"hit_rate": 0.5, "altered": 7 if kl else 0}
    times = {
        "tpot_ms": tpot_ms,
        "ttft_ms": 10 * tpot_ms,
        "exposed_ms": tpot_ms / 2,
        "tokens_per_s": 1e3 / tpot_ms,
    }
    if mode == LIVE:
        times |= {
            "tpot_quartiles": (tpot_ms - 1, tpot_ms + 1),
            "ttft_quartiles": (9 * tpot_ms, 11 * tpot_ms),
        }
    return BenchRow(preset, budget, MACHINE, mode, **times, **quality, **(counted | rest))


def table(grounds: Grounds, *rows: BenchRow) -> list[Sheet]:
    return sheets(Benched(rows, SHAPE, grounds, ["shadow", "importance"], "Conditions", (), "job"))


ROWS = (
    row("full", 5.0, budget="100%"),
    row("on-demand", 20.0),
    row("shadow", 6.0, kl=0.02, loss_error=0.006),
    row("near", 10.0),
    row("importance", 15.0, kl=0.01, loss_error=0.006),
)


def test_ratios_to_full_and_on_demand() -> None:
    [shown] = table(measured(MACHINE), *ROWS)
    lines = [dict(zip(shown.columns, line, strict=True)) for line in shown.rows]
    assert [(line["preset"], line["loss"]) for line in lines] == [
        ("near *", "exact"),
        ("on-demand *", "exact"),
        ("shadow", "2.00 % (+- 0.60)"),
        ("importance", "not distinguishable (1.00 % +- 0.60)"),
        ("full *", "exact"),
    ]
    assert (
        lines[0]["time, full = 1"] == "2.00 (1.80 to 2.20)"
        and lines[0]["waiting, on-demand = 1"] == 0.5
    )
    assert lines[1]["first token, full = 1"] == "4.00 (3.60 to 4.40)"
    assert shown.note.startswith(
        f"CPU, in the proportions of {MACHINE}. Conditions. * not asked for"
    )
    assert not any(word in " ".join(shown.columns) for word in ("ms", "tokens/s", "link"))


@pytest.mark.parametrize(
    ("grounds", "is_absolute"),
    [
        (measured("auto"), True),
        (measured(MACHINE), False),
        (simulated("a100-pcie4", SHAPE.nbytes), False),
        (simulated("a100-pcie4", 1 << 40), True),
        (simulated("here", SHAPE.nbytes), True),
    ],
)
def test_times_stand_where_they_mean_something(grounds: Grounds, is_absolute: bool) -> None:
    [shown] = table(grounds, *ROWS)
    assert ("ms a token" in shown.columns) == ("tokens/s" in shown.columns) == is_absolute
    assert ("time, full = 1" in shown.columns) != is_absolute and grounds.says in shown.note


def test_a_simulation_knows_by_counters_what_is_exact() -> None:
    replayed = [row("near", 10.0, mode=SIMULATED, kl=None, altered=0)]
    replayed += [row("shadow", 6.0, mode=SIMULATED, kl=None, altered=7)]
    [shown] = table(simulated("a100-pcie4", SHAPE.nbytes), *replayed)
    assert [line[shown.columns.index("output")] for line in shown.rows] == ["exact", "altered"]
    assert "KL" not in shown.columns


def test_other_tools_have_a_table_of_their_own() -> None:
    peer = row("llama.cpp", 4.0, mode=PEER, altered=None, loss_error=0.0)
    imported = row("llama-bench", 4.0, mode=IMPORTED, kl=None)
    ours, theirs = table(measured(MACHINE), *ROWS, peer, imported)
    [told] = [line for line in ours.rows if line[1] == "llama.cpp, peer"]
    assert "exact" not in told and "not distinguishable (0.00 % +- 0.00)" in told, (
        "nothing of it is counted"
    )
    assert (
        theirs.rows == [("llama-bench, imported", 40.0, 4.0, 250.0)]
        and "tokens/s" in theirs.columns
    )
