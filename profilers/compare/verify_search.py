"""Verifies the predictions of a search by live runs: quality on held-out text, and times in
interleaved rounds."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
_LINK = "tuned"  # the name of the one emulated link
# predicted times within this factor are equal, and the smaller loss is tried first
_SAME_TIME = 1.01


@dataclass(frozen=True, slots=True)
class MeasuredBeside:
    """One setting measured in the same rounds as others: its result, its time over the time of
    `full` per round, and the number of rounds."""

    measured: BenchResult
    to_full: float
    num_rounds: int


@dataclass(frozen=True, slots=True)
class CandidateQuality:
    """The quality of one candidate on the held-out text, the stall of reading all of it, and the
    standard error of the loss."""

    loss: float
    kl: float
    top1: float
    stall_ms: float
    loss_error: float | None = None

    @classmethod
    def of(cls, sample: BenchSample) -> "CandidateQuality":
        return cls(
            sample.perplexity_ratio - 1,
            sample.kl,
            sample.top1_agreement,
            sample.exposed_ms,
            sample.loss_error,
        )


class Verifier:
    """Runs combinations of policies in sessions of one budget: quality on `text`, times on its
    first `timed` sequences."""

    def __init__(
        self,
        opened: MoeModel,
        artefacts: Artefacts,
        text: BenchText,
        pace: LiveCosts,
        *,
        budget: str,
        timed: int = 2,
    ) -> None:
        self._presets: dict[str, Preset] = {}
        self._budget = budget
        emulations = LinkEmulations(opened, {_LINK: dict(pace.settings)})
        brief = BenchText(text.sequences[:timed], text.prefill)
        self._whole, self._brief = (
            Bench(opened, artefacts, part, emulations, self._presets) for part in (text, brief)
        )
        self._qualities: dict[Combination, CandidateQuality] = {}
        for bench in (self._whole, self._brief):
            bench.read_full()

    def quality(self, combination: Combination, *, briefly: bool = False) -> CandidateQuality:
        """Return a combination's quality, `briefly` on the timed sequences only. Raises a Problem
        if it cannot run."""
        if briefly:
            return CandidateQuality.of(self._brief.measure(self._setting(combination)))
        if combination not in self._qualities:
            self._qualities[combination] = CandidateQuality.of(
                self._whole.measure(self._setting(combination))
            )
        return self._qualities[combination]

    def loss_of_base(self, checkpoint: MoeModel) -> Quality:
        """Return the quality of the base against the checkpoint on all of the text."""
        return self._whole.loss_of_base(checkpoint)

    @property
    def num_scored(self) -> int:
        """Number of tokens that a quality is measured on."""
        return self._whole.num_scored

    def measured(self) -> dict[Combination, CandidateQuality]:
        """Return the qualities measured so far on all of the text."""
        return dict(self._qualities)

    def beside(
        self,
        named: Mapping[str, Combination | str],
        *,
        rounds: int,
        seed: int,
        progress: Callable[[int, int], None],
        is_late: Callable[[], bool] = lambda: False,
        needed: Collection[str] = (),
    ) -> dict[str, MeasuredBeside]:
        """Measure combinations, presets by name, and `full`, each once per round in a random order,
        until it `is_late`; `full` and those `needed` are measured once in any case. Those that
        cannot run are left out."""
        settings = {
            name: self._setting(candidate) for name, candidate in {FULL: FULL, **named}.items()
        }
        distinct = list(dict.fromkeys(settings.values()))
        samples: dict[BenchSetting, dict[int, BenchSample]] = {setting: {} for setting in distinct}
        order = schedule(distinct, rounds=rounds, seed=seed)
        first = {settings[name] for name in (FULL, *needed)}
        for number, (turn, setting) in enumerate(order):
            if setting not in samples or (is_late() and (turn or setting not in first)):
                continue
            progress(number, len(order))
            try:
                samples[setting][turn] = self._brief.measure(setting)
            except Problem:
                del samples[setting]
        full = samples[settings[FULL]]
        return {
            name: MeasuredBeside(
                summary(list(by_round.values())), _to_full(by_round, full), len(by_round)
            )
            for name, setting in settings.items()
            if (by_round := samples.get(setting))
        }

    def _setting(self, candidate: Combination | str) -> BenchSetting:
        if isinstance(candidate, str):
            return BenchSetting(candidate, presets()[candidate].budget or self._budget, _LINK)
        name = "+".join(candidate)
        preset = Preset(
            name, "a candidate", "moectl tune", **candidate.policies, scope=candidate.scope
        )
        self._presets.setdefault(name, preset)
        return BenchSetting(name, self._budget, _LINK)


def _to_full(samples: Mapping[int, BenchSample], full: Mapping[int, BenchSample]) -> float:
    """Return the median over rounds of a setting's time over the time of `full`."""
    return median(
        fmean(samples[turn].tpot_ms) / fmean(full[turn].tpot_ms) for turn in samples if turn in full
    )


def first_within(
    verifier: Verifier,
    candidates: Sequence[Tried],
    max_loss: float,
    *,
    most: int,
    is_late: Callable[[], bool] = lambda: False,
) -> tuple[Tried | None, dict[Combination, CandidateQuality]]:
    """Return the first candidate by predicted time whose loss in a live run is at most `max_loss`,
    and all qualities measured. At most `most` are tried, and none after the first when `is_late`. A
    loss above its prediction corrects the predictions of the same kind."""
    qualities: dict[Combination, CandidateQuality] = {}
    factor = dict.fromkeys((False, True), 1.0)
    waiting = sorted(
        (candidate for candidate in candidates if candidate.loss is not None), key=_by_time
    )

    def expected_loss(candidate: Tried) -> float:
        return candidate.loss * factor[_replaces(candidate)]

    while waiting and len(qualities) < most and not (qualities and is_late()):
        hopeful = [candidate for candidate in waiting if expected_loss(candidate) <= max_loss]
        tried = hopeful[0] if hopeful else min(waiting, key=expected_loss)
        waiting.remove(tried)
        try:
            quality = qualities[tried.combination] = verifier.quality(tried.combination)
        except Problem:
            continue
        if quality.loss <= max_loss:
            return tried, qualities
        kind = _replaces(tried)
        factor[kind] = max(factor[kind], quality.loss / max(tried.loss, 1e-9))
    return None, qualities


def _replaces(candidate: Tried) -> bool:
    return candidate.damage[1] > candidate.damage[0]


def _by_time(candidate: Tried) -> tuple[int, float]:
    """Sort by predicted time, rounded to `_SAME_TIME`, then by loss."""
    return round(log(candidate.ms) / log(_SAME_TIME)), candidate.loss or 0.0


def fastest(measured: Mapping[str, MeasuredBeside], names: Iterable[str]) -> str | None:
    """Return the name with the least time over the time of `full`, among the settings that ran."""
    ran = [name for name in names if name in measured]
    return min(ran, key=lambda name: measured[name].to_full, default=None)
