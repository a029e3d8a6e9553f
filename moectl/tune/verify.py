"""Chooses the picks of a search by live runs beside published presets, and checks them on other text."""

from collections.abc import Callable

from artifacts.errors import Incompatible, Problem
from moectl.shared.progress import Phases, progress_bar
from moectl.tune.request import LOSSLESS, TuneRequest
from moectl.tune.result import Check, Pick, published_of_others
from profilers.compare.verify_search import CandidateQuality, MeasuredBeside, Verifier, fastest, first_within
from runtime.search.results import MOST_PASSES, SearchResult, Tried
from runtime.search.search import Search
from runtime.search.space import Combination

_MOST_TRIED = 6  # lossy candidates verified live
_SHOWN = 2  # lossless candidates, and published presets, measured live beside each other
_ROUNDING = 1e-3  # nats; exact with whole experts, about 2e-4 with split ones in bfloat16
_BESIDE = ("on-demand", "near", "uniform-bits")


def verified(
    found: SearchResult, verifier: Verifier, request: TuneRequest, phases: Phases, *, is_late: Callable[[], bool]
) -> tuple[list[Pick], dict[str, MeasuredBeside], str]:
    """Choose a lossless pick, the fastest live of the fastest predicted, and a lossy one, the first that is good enough
    live. Returns the picks, everything measured beside them by name, and why there is no lossy pick, if so. When
    `is_late`, no further lossy candidate is read and no further round begun.

    Raises Incompatible if no lossless candidate runs.
    """
    if not found.lossless:
        raise Incompatible(f"nothing lossless runs at --budget {request.budget}: give more")
    exact = {f"{request.name}{LOSSLESS} ({n})": one for n, one in enumerate(found.lossless[: _SHOWN + 1], 1)}
    candidates = found.lossy if request.max_loss else []
    phases.begin("reading the held-out text by candidates that lose something")
    lossy, tried = first_within(verifier, candidates, request.max_loss, most=_MOST_TRIED, is_late=is_late)
    named: dict[str, Combination | str] = {name: one.combination for name, one in exact.items()}
    if lossy:
        named[request.name] = lossy.combination
    named |= {name: name for name in (*_BESIDE, *_rivals(found, request.max_loss))}
    phases.begin("measuring beside each other")
    with progress_bar("measuring", unit="readings") as advance:
        live = verifier.beside(named, rounds=request.rounds, seed=request.seed, progress=advance, is_late=is_late)
    phases.begin("reading the held-out text by the picks")
    chosen = fastest(live, exact)
    if chosen is None:
        raise Incompatible("none of the lossless candidates ran live")
    best = exact[chosen]
    kept = {name: one for name, one in live.items() if name not in exact or name == chosen}
    lossless = Pick(f"{request.name}{LOSSLESS}", best, _unmoved(verifier, best.combination), kept.pop(chosen))
    kept[lossless.name] = lossless.live
    if lossy is None:
        why = "" if not request.max_loss else _why(found, len(tried), request)
        return [lossless, Pick(request.name, best, lossless.quality, lossless.live)], kept, why
    pick = Pick(request.name, lossy, verifier.quality(lossy.combination), kept.get(request.name))
    if pick.live and pick.live.to_full > lossless.live.to_full:
        why = "the best that loses something is no faster live than the best that loses nothing"
        return [lossless, Pick(request.name, best, lossless.quality, lossless.live)], kept, why
    return [lossless, pick], kept, ""


def _unmoved(verifier: Verifier, combination: Combination) -> CandidateQuality | None:
    """The quality of a lossless combination, which must not change the logits; None if it cannot be measured."""
    try:
        quality = verifier.quality(combination)
    except Problem:
        return None
    assert quality.kl <= _ROUNDING, f"lossless, and yet it moves the logits (KL {quality.kl:.2g}): {combination}"
    return quality


def _why(found: SearchResult, num_tried: int, request: TuneRequest) -> str:
    if not any(one.loss is not None for one in found.lossy):
        return "no candidate that loses something has a measured loss: run `moectl profile` and `moectl quantize`"
    return f"none of the {num_tried} most promising kept within {100 * request.max_loss:g} % of perplexity live"


def _rivals(found: SearchResult, max_loss: float) -> list[str]:
    """Published presets to measure as well: the fastest lossless ones, and the fastest with a predicted loss of at most
    twice the allowed one."""
    published = published_of_others(found)
    by_time = sorted(published, key=lambda name: published[name].ms)
    exact = [name for name in by_time if published[name].is_lossless][:_SHOWN]
    near = [name for name in by_time if _within(published[name], 2 * max_loss)][:_SHOWN]
    return list(dict.fromkeys((*exact, *near)))


def _within(one: Tried, max_loss: float) -> bool:
    return one.loss is not None and 0 < one.loss <= max_loss


def checks_of(
    picks: list[Pick], found: SearchResult, other: Search, search: Search, request: TuneRequest, other_name: str
) -> list[Check]:
    """Compare each pick with published presets on the other trace, over as many passes as the search replayed."""
    amount = min(other.num_passes, search.num_passes, MOST_PASSES)
    other.scale = search.scale
    checks = []
    for pick in picks:
        rivals = [one for one in published_of_others(found).values() if one.loss is not None]
        rivals = [one for one in rivals if one.loss <= (0 if pick.tried.is_lossless else request.max_loss)]
        if not rivals:
            continue
        here = 1 - pick.tried.ms / min(one.ms for one in rivals)
        theirs = min(other.replay(one.combination, amount).ms for one in rivals)
        there = 1 - other.replay(pick.tried.combination, amount).ms / theirs
        checks.append(Check(pick.name, other_name, here, there))
    return checks
