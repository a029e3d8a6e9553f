"""Predictions that were compared with measured speeds, as rows of the store's `verifications`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import pyarrow as pa

from artifacts.store.store import Store

TABLE = "verifications"
ENOUGH = 10
"""Verifications from which an interval is taken."""


@dataclass(frozen=True, slots=True)
class Verification:
    """A predicted and a measured number of tokens a second, of `engine` on `machine`; the columns
    of `verifications`."""

    model: str
    digest: str
    engine: str
    version: str
    machine: str
    setting: str
    predicted: float
    measured: float
    spread: float
    runs: int

    @property
    def error(self) -> float:
        """By how much more was predicted than measured, as a part of the measured."""
        return self.predicted / self.measured - 1


_NUMBERS = {"predicted": pa.float64(), "measured": pa.float64(), "spread": pa.float64()}
_TYPES = _NUMBERS | {"runs": pa.int32()}
_SCHEMA = pa.schema(
    [(name, _TYPES.get(name, pa.string())) for name in Verification.__dataclass_fields__]
)


def to_rows(verifications: Sequence[Verification]) -> pa.Table:
    """Rows of `verifications`."""
    return pa.Table.from_pylist([asdict(each) for each in verifications], schema=_SCHEMA)


def verifications_of(store: Store, engine: str, machine: str) -> list[Verification]:
    """Return those of an engine on a machine, oldest first."""
    found = [
        Verification(**row)
        for run in store.runs(table=TABLE)
        for row in store.read(TABLE, run.run_id).to_pylist()
    ]
    return [each for each in found if (each.engine, each.machine) == (engine, machine)]


def interval(verified: Sequence[Verification], predicted: float) -> tuple[float, float] | None:
    """Return between which the measured number is expected to be: the predicted one times the least
    and the most of measured over predicted, without the outermost of each 20; None for fewer than
    `ENOUGH`."""
    if len(verified) < ENOUGH:
        return None
    ratios = sorted(each.measured / each.predicted for each in verified)
    outer = len(ratios) // 20
    return predicted * ratios[outer], predicted * ratios[-1 - outer]


def median_error(verified: Sequence[Verification]) -> float:
    """Return the median of the errors' sizes."""
    return median(abs(each.error) for each in verified)
