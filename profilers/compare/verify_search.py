"""Checks by live runs what a search predicts: quality on held-out text, and times beside each other, round by round."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean, median

from artifacts.errors import Problem
from profilers.compare.bench import (
    Bench,
    BenchResult,
    BenchSample,
    BenchSetting,
    BenchText,
    LinkEmulations,
    schedule,
    summary,
)
from profilers.compare.quality import Quality
from profilers.hardware.live_costs import LiveCosts
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.policies.presets import Preset, presets
from runtime.search.results import Tried
from runtime.search.space import Combination

FULL = "full"
_LINK = "tuned"  # a name of the emulation that all share
_SAME_TIME = 1.01  # predictions this close are equal, and the smaller loss goes first


@dataclass(frozen=True, slots=True)
class MeasuredBeside:
    """One setting measured beside others: over all rounds, and its time over that of `full` in the same round."""

    measured: BenchResult
    to_full: float


@dataclass(frozen=True, slots=True)
class CandidateQuality:
    """Of one candidate on the held-out text. `stall_ms` of a whole reading."""

    loss: float
    kl: float
    top1: float
    stall_ms: float

    @classmethod
    def of(cls, sample: BenchSample) -> "CandidateQuality":
        return cls(sample.perplexity_ratio - 1, sample.kl, sample.top1_agreement, sample.exposed_ms)


class Verifier:
    """Runs combinations of policies at one budget as a session would, on `text`; times on its first `timed`
    sequences."""

    def __init__(
        self, opened: MoeModel, artefacts: Artefacts, text: BenchText, pace: LiveCosts, *, budget: str, timed: int = 2
    ) -> None:
        self._known: dict[str, Preset] = {}
        self._budget = budget
        paces = LinkEmulations(opened, {_LINK: dict(pace.settings)})
        brief = BenchText(text.sequences[:timed], text.prefill)
        self._whole, self._brief = (Bench(opened, artefacts, one, paces, self._known) for one in (text, brief))
        self._qualities: dict[Combination, CandidateQuality] = {}
        for bench in (self._whole, self._brief):
            bench.read_full()

    def quality(self, combination: Combination, *, briefly: bool = False) -> CandidateQuality:
        """Raises a Problem for what cannot run. `briefly`: on the few sequences on which times are taken."""
        if briefly:
            return CandidateQuality.of(self._brief.measure(self._setting(combination)))
        if combination not in self._qualities:
            self._qualities[combination] = CandidateQuality.of(self._whole.measure(self._setting(combination)))
        return self._qualities[combination]

    def loss_of_base(self, checkpoint: MoeModel) -> Quality:
        """Of the base itself against the checkpoint, on all of the text."""
        return self._whole.loss_of_base(checkpoint)

    def measured(self) -> dict[Combination, CandidateQuality]:
        """The qualities that were measured on all of the text."""
        return dict(self._qualities)

    def beside(
        self, named: Mapping[str, Combination | str], *, rounds: int, seed: int, progress: Callable[[int, int], None]
    ) -> dict[str, MeasuredBeside]:
        """Combinations, and presets by name, each once a round in an order drawn anew; with `full`. What cannot run is
        left out."""
        settings = {name: self._setting(one) for name, one in {FULL: FULL, **named}.items()}
        distinct = list(dict.fromkeys(settings.values()))
        samples: dict[BenchSetting, dict[int, BenchSample]] = {one: {} for one in distinct}
        order = schedule(distinct, rounds=rounds, seed=seed)
        for number, (turn, setting) in enumerate(order):
            progress(number, len(order))
            try:
                samples[setting][turn] = self._brief.measure(setting)
            except Problem:
                samples.pop(setting, None)
                order = [one for one in order if one[1] != setting]
        full = samples[settings[FULL]]
        return {
            name: MeasuredBeside(summary(list(own.values())), _to_full(own, full))
            for name, setting in settings.items()
            if (own := samples.get(setting))
        }

    def _setting(self, one: Combination | str) -> BenchSetting:
        if isinstance(one, str):
            return BenchSetting(one, presets()[one].budget or self._budget, _LINK)
        name = "+".join(one)
        self._known.setdefault(name, Preset(name, "a candidate", "moectl tune", **one.policies, scope=one.scope))
        return BenchSetting(name, self._budget, _LINK)


def _to_full(own: Mapping[int, BenchSample], full: Mapping[int, BenchSample]) -> float:
    return median(fmean(own[turn].tpot_ms) / fmean(full[turn].tpot_ms) for turn in own if turn in full)


def first_within(
    verifier: Verifier, candidates: Sequence[Tried], max_loss: float, *, most: int
) -> tuple[Tried | None, dict[Combination, CandidateQuality]]:
    """The first of the candidates, by predicted time, that a live run finds to lose no more than `max_loss`; at most
    `most` are tried. One that loses more than was predicted corrects the predictions of its kind."""
    found: dict[Combination, CandidateQuality] = {}
    factor = dict.fromkeys((False, True), 1.0)
    waiting = sorted((one for one in candidates if one.loss is not None), key=_by_time)
    while waiting and len(found) < most:
        hopeful = [one for one in waiting if one.loss * factor[_replaces(one)] <= max_loss]
        tried = hopeful[0] if hopeful else min(waiting, key=lambda one: one.loss * factor[_replaces(one)])
        waiting.remove(tried)
        try:
            quality = found[tried.combination] = verifier.quality(tried.combination)
        except Problem:
            continue
        if quality.loss <= max_loss:
            return tried, found
        kind = _replaces(tried)
        factor[kind] = max(factor[kind], quality.loss / max(tried.loss, 1e-9))
    return None, found


def _replaces(one: Tried) -> bool:
    return one.damage[1] > one.damage[0]


def _by_time(one: Tried) -> tuple[int, float]:
    """Equal times count as one: the smaller loss goes first."""
    return round(log(one.ms) / log(_SAME_TIME)), one.loss or 0.0


def fastest(found: Mapping[str, MeasuredBeside], names: Iterable[str]) -> str | None:
    """Of those that ran, by its time over that of `full`."""
    ran = [name for name in names if name in found]
    return min(ran, key=lambda name: found[name].to_full, default=None)
