"""What each of several devices had and did, as a table."""

from collections.abc import Mapping

from moectl.show.render import NumBytes, Sheet
from runtime.control.counters import hit_rate

_COLUMNS = ("device", "hops", "slots", "bytes", "resident", "requests", "hit rate", "misses", "demand", "prefetched")


def devices_sheet(devices: Mapping[str, Mapping[str, int]]) -> Sheet:
    """`devices` by name, as a receipt has them."""
    return Sheet("Devices", _COLUMNS, [_row(name, counts) for name, counts in devices.items()])


def _row(name: str, counts: Mapping[str, int]) -> tuple:
    has = (counts["hops"], counts["slots"], NumBytes(counts["slot_bytes"]), counts["resident"], counts["requests"])
    moved = (NumBytes(counts[f"{cause}_bytes"]) for cause in ("demand", "prefetch"))
    return (name, *has, hit_rate(counts), counts["misses"], *moved)
