"""BuddyMoE, section 3.2: what it says of routing, on recorded routing, by thirds of requests."""

from collections.abc import Iterator, Sequence

import numpy as np

from moectl.show.render import Sheet
from tools.reproductions.judged import by_seed, number
from tools.reproductions.recorded import Recorded, evenness, peers_for, rank_correlation
from tools.reproductions.report import Claim

_FEW = 1 / 3  # of the peers are few
_FALLS = -0.3  # a rank correlation with the depth below this is a fall


def of_routing(recorded: Recorded) -> Iterator[Claim]:
    """Skew, concentration of co-activation, and how both change with the depth."""
    parts = recorded.parts()
    shape = recorded.shape
    quarter = (shape.num_experts // 4) / shape.num_experts
    yield by_seed(
        f"{recorded.name}: a quarter of the experts dominates a layer (3.2, Figure 6)",
        "above half of the selections",
        [one.busiest for one in parts],
        off="all experts alike",
        null=[quarter] * len(parts),
        test=lambda share: share > 0.5,
        form=number(".1%"),
        over="thirds",
    )
    yield by_seed(
        f"{recorded.name}: few peers hold 75 % of an expert's co-activation (3.2)",
        "below a third of the peers",
        [_share_of_peers(one) for one in parts],
        off="selected together at random",
        null=[_share_of_peers(one, mixed=True) for one in parts],
        test=lambda share: share < _FEW,
        form=number(".1%"),
        over="thirds",
    )
    falls = [one.by_layer(evenness) for one in parts]
    random = np.random.default_rng(0)
    yield by_seed(
        f"{recorded.name}: co-activation is tighter in later layers (3.2)",
        f"rank correlation of its entropy with the depth below {_FALLS:g}",
        [rank_correlation(one) for one in falls],
        off="layers in random order",
        null=[rank_correlation(random.permutation(one)) for one in falls],
        test=lambda correlation: correlation < _FALLS,
        form=number("+.2f"),
        over="thirds",
    )


def _share_of_peers(recorded: Recorded, *, mixed: bool = False) -> float:
    peers = recorded.by_layer(peers_for, mixed=mixed).mean()
    return float(peers / (recorded.shape.num_experts - 1))


def routing_sheet(every: Sequence[Recorded]) -> Sheet:
    """Beside what remains where experts are selected together at random, as often as recorded."""
    rows = []
    for recorded in every:
        for label, mixed in (("as recorded", False), ("together at random", True)):
            even = recorded.by_layer(evenness, mixed=mixed)
            peers = recorded.by_layer(peers_for, mixed=mixed).mean()
            rows.append(
                (recorded.name, label, recorded.shape.num_experts - 1, peers, even.mean())
                + (rank_correlation(even),)
            )
    columns = (
        "routing",
        "selected",
        "peers",
        "hold 75 %",
        "entropy",
        "rank correlation with depth",
    )
    return Sheet("Section 3.2: co-activation of recorded routing", columns, rows)
