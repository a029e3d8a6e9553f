"""Chooses the picks of a search by live runs beside published presets, and checks them on other
text."""

from collections.abc import Mapping
from dataclasses import dataclass

from artifacts.errors import Incompatible, Problem
from moectl.shared.terminal.progress import progress_bar
from moectl.tune.request import LOSSLESS, TuneRequest
from moectl.tune.result import ROUNDING, Check, Pick, published_of_others
from moectl.tune.timing import NO_SCALE, Minutes
from profilers.compare.verify_search import (
    CandidateQuality,
    MeasuredBeside,
    Verifier,
    fastest,
    first_within,
)
from runtime.search.results import MOST_PASSES, SearchResult, Tried
from runtime.search.search import Search
from runtime.search.space import Combination

_MOST_TRIED = 6  # lossy candidates verified live
_SHOWN = 2  # lossless candidates, and published presets, measured live beside each other
_SLOWER = "lossy candidate"  # the name of one that is no faster than what loses nothing
_BESIDE = ("on-demand", "near", "uniform-bits")


@dataclass(frozen=True, slots=True)
class VerifiedPicks:
    """The picks, everything that was measured live beside them by name, and in `why` the reason why
    no pick loses something."""

    picks: list[Pick]
    live: dict[str, MeasuredBeside]
    why: str = ""


def verified(
    found: SearchResult, verifier: Verifier, request: TuneRequest, minutes: Minutes
) -> VerifiedPicks:
    """Choose a lossless pick and a lossy one.

    The lossless pick is the fastest live of the fastest predicted. The lossy pick is the faster
    live of two that are good enough live and do not treat misses alike. When the minutes are over,
    what is not needed for a pick is left out. Raises Incompatible if no lossless candidate runs.
    """
    if not found.lossless:
        raise Incompatible(f"nothing lossless runs at --budget {request.budget}: give more")
    exact = {
        f"{request.name}{LOSSLESS} ({n})": one
        for n, one in enumerate(found.lossless[: _SHOWN + 1], 1)
    }
    losing, why = _lossy(found, verifier, request, minutes)
    live = _beside(exact, losing, found, verifier, request, minutes)
    minutes.phases.begin("checking the answers")
    chosen = (
        next((name for name in exact if name in live), None)
        if request.clients
        else fastest(live, exact)
    )
    if chosen is None:
        raise Incompatible("none of the lossless candidates ran live")
    best = exact[chosen]
    kept = {name: one for name, one in live.items() if name not in exact or name == chosen}
    is_read = not minutes.lack("a check that the lossless answer leaves the text as it was")
    quality = _unmoved(verifier, best.combination) if is_read else None
    lossless = Pick(f"{request.name}{LOSSLESS}", best, quality, kept.pop(chosen))
    kept[lossless.name] = lossless.live
    same = Pick(request.name, best, lossless.quality, lossless.live)
    if not losing:
        return VerifiedPicks([lossless, same], kept, why)
    ran = next(iter(losing)) if request.clients else fastest(live, losing) or next(iter(losing))
    lossy = losing[ran]
    kept = {
        request.name if name == ran else name: one
        for name, one in kept.items()
        if name == ran or name not in losing
    }
    pick = Pick(request.name, lossy, verifier.quality(lossy.combination), kept.get(request.name))
    if request.clients:
        is_slower = lossy.ms > best.ms
        where = f"simulated for {request.clients} clients"
    else:
        is_slower = bool(pick.live) and pick.live.to_full > lossless.live.to_full
        where = "live"
    if is_slower:
        why = f"the best that loses something is no faster {where} than the best that loses nothing"
        kept |= {_SLOWER: kept.pop(request.name)} if pick.live else {}
        return VerifiedPicks([lossless, same], kept, why)
    return VerifiedPicks([lossless, pick], kept)


def _lossy(
    found: SearchResult, verifier: Verifier, request: TuneRequest, minutes: Minutes
) -> tuple[dict[str, Tried], str]:
    """Return up to two lossy candidates by name, or none and the reason.

    The first loses little enough live; the second too, and treats misses otherwise. There are two
    because predicted times of near computing and of waiting are rough.
    """
    minutes.phases.begin("checking what loses something")
    candidates = found.lossy if request.max_loss else []
    if candidates and (
        NO_SCALE in minutes.left_out or minutes.lack("candidates that lose something")
    ):
        return {}, "there was no time to look at what loses something: give more --minutes"
    is_late = minutes.phases.is_late
    chosen = []
    num_tried = 0
    while candidates and len(chosen) < _SHOWN:
        lossy, tried = first_within(
            verifier, candidates, request.max_loss, most=_MOST_TRIED, is_late=is_late
        )
        num_tried += len(tried)
        if lossy is None:
            break
        chosen.append(lossy)
        candidates = [one for one in candidates if _miss(one) != _miss(lossy)]
    named = {f"{request.name} ({n})": one for n, one in enumerate(chosen, 1)}
    return named, "" if chosen or not request.max_loss else _why(found, num_tried, request)


def _miss(one: Tried) -> str:
    """Return the policy that decides what becomes of a miss, without its parameters."""
    return one.combination.miss.partition(":")[0]


def _beside(
    exact: Mapping[str, Tried],
    lossy: Mapping[str, Tried],
    found: SearchResult,
    verifier: Verifier,
    request: TuneRequest,
    minutes: Minutes,
) -> dict[str, MeasuredBeside]:
    """Measure the candidates beside presets; the first of each kind even when it is late."""
    named: dict[str, Combination | str] = {
        name: one.combination for name, one in (exact | lossy).items()
    }
    needed = [*list(exact)[:1], *lossy]
    named |= {name: name for name in (*_BESIDE, *_rivals(found, request.max_loss))}
    minutes.phases.begin(f"measuring {len(named) + 1} settings beside each other")
    is_late = minutes.phases.is_late
    rounds = request.rounds
    with progress_bar("measuring", unit="readings") as advance:
        live = verifier.beside(
            named,
            rounds=rounds,
            seed=request.seed,
            progress=advance,
            is_late=is_late,
            needed=needed,
        )
    done = min(one.num_rounds for one in live.values())
    if done < rounds or len(live) <= len(named):
        minutes.lack(
            f"live rounds: {done} of {rounds} were measured, of {len(live)} of {len(named) + 1} "
            "settings"
        )
    return live


def _unmoved(verifier: Verifier, combination: Combination) -> CandidateQuality | None:
    """The quality of a lossless combination, which must not change the logits; None if it cannot be
    measured."""
    try:
        quality = verifier.quality(combination)
    except Problem:
        return None
    assert quality.kl <= ROUNDING, (
        f"lossless, and yet it moves the logits (KL {quality.kl:.2g}): {combination}"
    )
    return quality


def _why(found: SearchResult, num_tried: int, request: TuneRequest) -> str:
    if not any(one.loss is not None for one in found.lossy):
        return (
            "no candidate that loses something has a measured loss: run `moectl profile` and "
            "`moectl quantize`"
        )
    return (
        f"none of the {num_tried} most promising kept within {100 * request.max_loss:g} % of "
        "perplexity live"
    )


def _rivals(found: SearchResult, max_loss: float) -> list[str]:
    """Published presets to measure as well: the fastest lossless ones, and the fastest with a
    predicted loss of at most twice the allowed one."""
    published = published_of_others(found)
    by_time = sorted(published, key=lambda name: published[name].ms)
    exact = [name for name in by_time if published[name].is_lossless][:_SHOWN]
    near = [name for name in by_time if _within(published[name], 2 * max_loss)][:_SHOWN]
    return list(dict.fromkeys((*exact, *near)))


def _within(one: Tried, max_loss: float) -> bool:
    return one.loss is not None and 0 < one.loss <= max_loss


def checks_of(
    picks: list[Pick],
    found: SearchResult,
    other: Search,
    search: Search,
    request: TuneRequest,
    other_name: str,
    minutes: Minutes,
) -> list[Check]:
    """Compare each pick with published presets on the other trace, over as many passes as the
    search replayed."""
    minutes.phases.begin("replaying the answers on other text")
    if minutes.lack("replays of the picks on other text"):
        return []
    amount = min(other.num_passes, search.num_passes, MOST_PASSES)
    other.scale = search.scale
    checks = []
    for pick in picks:
        rivals = [one for one in published_of_others(found).values() if one.loss is not None]
        rivals = [
            one for one in rivals if one.loss <= (0 if pick.tried.is_lossless else request.max_loss)
        ]
        if not rivals:
            continue
        here = 1 - pick.tried.ms / min(one.ms for one in rivals)
        theirs = min(other.replay(one.combination, amount).ms for one in rivals)
        there = 1 - other.replay(pick.tried.combination, amount).ms / theirs
        checks.append(Check(pick.name, other_name, here, there))
    return checks
