"""Counters as tables: by layer, and by device where there are several."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moectl.show.render import NumBytes, Sheet
from runtime.control.counters import hit_rate

if TYPE_CHECKING:
    from runtime.session.generation.stream import Effort

_COUNTED = ("late", "misses", "fetched", "near", "low", "spared", "collisions", "evictions")
_OF_DEVICES = (
    "device",
    "hops",
    "slots",
    "bytes",
    "resident",
    "requests",
    "hit rate",
    "misses",
    "demand",
    "prefetched",
)


def counters_sheet(effort: "Effort", *, note: str = "") -> Sheet:
    """One row for each layer, and one for their sums."""
    columns = ("layer", "requests", "hit rate", *_COUNTED)
    rows = [_layer_row(layer, counts) for layer, counts in enumerate(effort.by_layer)]
    rows.append(_layer_row("all", effort.counters))
    return Sheet("Counters", columns, rows, note)


def devices_sheet(devices: Mapping[str, Mapping[str, int]]) -> Sheet:
    """One row for each device; `devices` maps names to counters, as in a receipt."""
    return Sheet(
        "Devices", _OF_DEVICES, [_device_row(name, counts) for name, counts in devices.items()]
    )


def _layer_row(layer: int | str, counts: dict[str, int]) -> tuple:
    return (str(layer), counts["requests"], hit_rate(counts), *(counts[name] for name in _COUNTED))


def _device_row(name: str, counts: Mapping[str, int]) -> tuple:
    has = (
        counts["hops"],
        counts["slots"],
        NumBytes(counts["slot_bytes"]),
        counts["resident"],
        counts["requests"],
    )
    moved = (NumBytes(counts[f"{cause}_bytes"]) for cause in ("demand", "prefetch"))
    return (name, *has, hit_rate(counts), counts["misses"], *moved)
