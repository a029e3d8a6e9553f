"""SpecMD's claims that its own tables decide, and those that take its models."""

from collections.abc import Iterator
from statistics import mean

from artifacts.modelshapes.known import MODELS
from tools.reproductions.judged import derived, left_out, ruled_out
from tools.reproductions.report import NOT_TESTABLE, Claim
from tools.reproductions.specmd import figures as paper

_MB = 2**20
_GB = 2**30
_NEAR = 0.02  # sizes agree that differ by no more of the printed one
_FIVE = "mixtral-offloading,importance,hobbit,mixture-cache,specmd"
_UNMEASURED = (
    (
        "accuracy of the five mixes (Table 1)",
        "24 rows",
        f"moectl bench FOLDER --presets {_FIVE} --tasks",
    ),
    (
        "fetch-priority on Mixtral at 8 bits: accuracy (Figure 7)",
        "10 to 12 % more",
        "moectl bench on a preset with the miss policy fetch_priority:bits=8",
    ),
    (
        "drop-priority on Qwen1.5-MoE at 4 bits: accuracy (Figure 7)",
        "25 to 30 % less",
        "moectl bench --base 4 on a preset with the miss policy drop:rank=2",
    ),
)


def from_its_tables() -> Iterator[Claim]:
    """Yield what follows from the paper's other figures, or does not."""
    yield from _of_sizes()
    yield from _of_table_2()
    least, most = paper.RATES["least_stale"]
    lru, _ = paper.RATES["lru"]
    times = "{:g} to {:g}".format(*paper.FIGURE_8_RATIOS)
    yield ruled_out(
        "LRU's collisions over Least-Stale's at 1 %, at most (abstract, 1)",
        f"{paper.MOST_RATIO:g}",
        f"Figure 8 has {times} at 1, 5 and 25 %",
    )
    low, high = paper.RATES["score"]
    yield ruled_out(
        "score's collisions over Least-Stale's at 5 % (5.2)",
        "{:g} to {:g}".format(*paper.SCORE_RATIOS),
        f"from {low / most:.0f} to {high / least:.0f} by the rates of the same section",
    )
    yield ruled_out(
        "collision rates of all others over Least-Stale's, 1, 5 and 25 % (Figure 8)",
        f"{times} times",
        (
            f"LRU's at 5 %, from {lru / most:.1f} to {paper.RATES['lru'][1] / least:.1f} by the "
            "rates of section 5.2"
        ),
    )


def not_measured() -> Iterator[Claim]:
    """Yield what takes the paper's models or tasks."""
    for claim, printed, needed in _UNMEASURED:
        yield left_out(claim, printed, f"needs their weights: {needed}", NOT_TESTABLE)


def _of_sizes() -> Iterator[Claim]:
    pairs = []
    for name, sizes in paper.TABLE_3.items():
        shape = MODELS[name].shape
        used_gb = sizes.other_gb + shape.expert_nbytes * shape.num_layers * shape.top_k / _GB
        pairs += [
            (sizes.expert_mb, shape.expert_nbytes / _MB),
            (sizes.experts_gb, _experts_gb(name)),
        ]
        pairs.append((sizes.activated_gb, used_gb))
    near = sum(abs(ours - printed) <= _NEAR * printed for printed, ours in pairs)
    text = (
        "an expert, all experts and what a pass needs, in bytes (Table 3), from the shapes of the "
        "models"
    )
    yield derived(text, f"{len(pairs)} sizes", f"{near} within {_NEAR:.0%}", near == len(pairs))
    ours = [round(_experts_gb(name) * percent / 100, 1) for name, percent in paper.CAPACITIES_GB]
    text = "caches in GB, from the shapes of the models (1, 5.1)"
    printed = list(paper.CAPACITIES_GB.values())
    yield derived(text, ", ".join(map(str, printed)), ", ".join(map(str, ours)), ours == printed)


def _experts_gb(name: str) -> float:
    """GB of all experts in 16 bits."""
    shape = MODELS[name].shape
    return shape.expert_nbytes * shape.num_keys / _GB


def _of_table_2() -> Iterator[Claim]:
    computed = [100 * (1 - changed / own) for own, changed, _ in paper.TABLE_2.values()]
    printed = [gain for _, _, gain in paper.TABLE_2.values()]
    apart = max(abs(one - other) for one, other in zip(computed, printed, strict=True))
    yield derived(
        "gains of Table 2, from its times",
        "16 rows",
        f"at most {apart:.2f} points apart",
        apart <= 0.06,
    )
    average = mean(computed)
    text = "mean gain of the first token, % (6), from Table 2"
    yield derived(
        text, f"{paper.MEAN_SHORTER:g}", f"{average:.1f}", abs(average - paper.MEAN_SHORTER) < 1
    )
    low, high = paper.SHORTER_D
    inside = sum(low <= gain < high + 0.5 for gain in computed)
    text = "gains in most configurations, % (appendix D), from Table 2"
    yield derived(
        text, f"{low:g} to {high:g}", f"{inside} of {len(computed)}", inside > len(computed) / 2
    )
    yield ruled_out(
        "consistent gains across systems, % (5.2)",
        "{:g} to {:g}".format(*paper.SHORTER_5_2),
        f"Table 2 has {min(computed):.1f} to {max(computed):.1f}",
    )
