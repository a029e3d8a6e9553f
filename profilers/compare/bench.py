"""Measures settings on the same text, in rounds of random order, and their quality against the full
model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from statistics import median, median_low
from time import perf_counter
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from artifacts.errors import BadInput, BadUsage
from artifacts.hardware.machines import MACHINES, machine
from artifacts.modelshapes.kv_cache import AUTO
from profilers.compare.drafted import DraftedPairs, answers
from profilers.compare.quality import Quality, TextReading, compare, losses_by_text, read
from profilers.compare.tasks import Tasks, TaskScore, evaluate
from profilers.text.batches import check_sequences
from profilers.text.corpus import all_sequences
from profilers.text.files import Document
from runtime.backends.choose import choose_backend
from runtime.drafters.base import NONE
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.policies.presets import Preset
from runtime.session.probe import scaled_rates, scaled_window
from runtime.session.session import Session, Settings
from runtime.session.settings import EXACT, FUSED

Setting = TypeVar("Setting")


@dataclass(frozen=True, slots=True)
class BenchSetting:
    """A preset at a budget over a link, as a user writes them. When `link` names a machine, link
    and near tier are emulated in its proportions. A preset with a fixed budget keeps it."""

    preset: str
    budget: str
    link: str = "auto"


@dataclass(frozen=True, slots=True)
class BenchText:
    """Sequences of equal length; the first `prefill` tokens of each are its prompt. `asked` is the
    number of tokens that were asked for, 0 if just these."""

    sequences: tuple[np.ndarray, ...]
    prefill: int
    asked: int = 0

    @property
    def num_decoded(self) -> int:
        return sum(len(sequence) - self.prefill for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def shortfall(self) -> str:
        """Message that there are fewer tokens than were asked for; empty where there are not."""
        if self.num_tokens >= self.asked:
            return ""
        num = len(self.sequences)
        return (
            f"{self.num_tokens:,} tokens of the {self.asked:,} that were asked for: {num} "
            f"text{'s' * (num != 1)} of {len(self.sequences[0])}"
        )


@dataclass(frozen=True, slots=True)
class BenchSample:
    """One setting in one round. `ttft_ms` is each sequence's prompt, `tpot_ms` the mean of its
    decoded tokens. Counters, `exposed_ms` of stall and quality are over all sequences without the
    warm-up; `kl_by_text` and `loss_by_text` (of log-likelihood, nats per token) by sequence.
    `seconds` is the time of the whole measurement. `drafted`: what the prompts were answered
    with drafts and without, if that was asked for."""

    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    by_layer: tuple[dict[str, int], ...]
    exposed_ms: float
    fast_nbytes: int
    perplexity_ratio: float
    kl: float
    top1_agreement: float
    kl_by_text: tuple[float, ...]
    loss_by_text: tuple[float, ...]
    seconds: float
    loss_error: float | None = None  # of `perplexity_ratio`; samples of an earlier moectl have none
    drafted: DraftedPairs | None = None


_MEDIANS = ("exposed_ms", "perplexity_ratio", "kl", "top1_agreement")


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Quartiles over all sequences in all rounds."""

    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        return cls(*map(float, np.percentile(values, (25, 50, 75))))


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One setting over all rounds: quartiles of times, medians of everything else."""

    ttft_ms: Quartiles
    tpot_ms: Quartiles
    by_layer: tuple[dict[str, int], ...]
    exposed_ms: float
    fast_nbytes: int
    perplexity_ratio: float
    kl: float
    top1_agreement: float
    loss_error: float | None
    # of answers with drafts: the share of drafts that were accepted, tokens a pass, milliseconds a
    # token, and those over the same answers' without drafts
    acceptance: float | None = None
    tokens_per_pass: float | None = None
    drafted_tpot_ms: float | None = None
    drafted_ratio: Quartiles | None = None

    @property
    def counters(self) -> dict[str, int]:
        """The counters summed over all layers; empty for another program, which has none."""
        names = self.by_layer[0] if self.by_layer else ()
        return {name: sum(layer[name] for layer in self.by_layer) for name in names}


def text_of(documents: Iterator[Document], tokenizer, *, length: int, num_tokens: int) -> BenchText:
    """Return `num_tokens` in sequences of `length`; half of each is prompt.

    They are the beginnings of the first documents that are long enough. Where those are too few,
    the text that follows in each of them is taken too, then the text that follows that.

    Raises BadUsage when the tokens make no sequence, BadInput when no document is long enough.
    """
    if length < 2 or num_tokens < length:
        raise BadUsage(
            f"--tokens {num_tokens} are no sequence of --length {length}: one has two tokens or "
            "more"
        )
    wanted = num_tokens // length
    cuts: list[list[np.ndarray]] = [[]]  # by their number in the document
    for document in documents:
        for number, cut in enumerate(_whole_cuts(document, tokenizer, length)):
            if sum(map(len, cuts[: number + 1])) >= wanted:
                break  # nothing that is cut later would be taken
            if number == len(cuts):
                cuts.append([])
            cuts[number].append(cut)
        if len(cuts[0]) >= wanted:
            break
    sequences = tuple(islice(chain.from_iterable(cuts), wanted))
    if not sequences:
        raise BadInput(
            f"the data has no document of {length} tokens: give longer text, or a smaller --length"
        )
    return BenchText(sequences, length // 2, asked=num_tokens)


def _whole_cuts(document: Document, tokenizer, length: int) -> Iterator[np.ndarray]:
    return (cut for cut in all_sequences([document], tokenizer, length) if len(cut) == length)


def schedule(settings: Sequence[Setting], *, rounds: int, seed: int) -> list[tuple[int, Setting]]:
    """Return every setting once per round, in an order drawn for each round, so that other load on
    the machine affects all settings alike."""
    rng = np.random.default_rng(seed)
    return [
        (turn, settings[index])
        for turn in range(rounds)
        for index in rng.permutation(len(settings))
    ]


def summary(samples: Sequence[BenchSample]) -> BenchResult:
    """Summarise the samples of one setting."""
    layers = zip(*(sample.by_layer for sample in samples), strict=True)
    return BenchResult(
        ttft_ms=Quartiles.of([value for sample in samples for value in sample.ttft_ms]),
        tpot_ms=Quartiles.of([value for sample in samples for value in sample.tpot_ms]),
        by_layer=tuple(
            {name: median_low(counts[name] for counts in layer) for name in layer[0]}
            for layer in layers
        ),
        fast_nbytes=max(sample.fast_nbytes for sample in samples),
        loss_error=max(
            (sample.loss_error for sample in samples if sample.loss_error is not None), default=None
        ),
        **{name: median(getattr(sample, name) for sample in samples) for name in _MEDIANS},
        **_of_drafts([sample.drafted for sample in samples if sample.drafted]),
    )


def _of_drafts(pairs: Sequence[DraftedPairs]) -> dict[str, object]:
    """Return the fields of `BenchResult` on drafts; empty where nothing was answered with them."""
    if not pairs:
        return {}
    drafted = [pair.drafted for pair in pairs]
    total = replace(
        drafted[0],
        **{
            name: sum(getattr(one, name) for one in drafted)
            for name in ("tokens", "passes", "drafted", "accepted")
        },
    )
    return {
        "acceptance": total.acceptance,
        "tokens_per_pass": total.tokens_per_pass,
        "drafted_tpot_ms": median(chain.from_iterable(one.tpot_ms for one in drafted)),
        "drafted_ratio": Quartiles.of([ratio for pair in pairs for ratio in pair.ratios]),
    }


class LinkEmulations:
    """Emulation of each link and the bytes that may be prefetched over it, measured once for all
    settings and rounds.

    `known` starts with the links of an interrupted bench; `experts` is as in `Settings`.
    """

    def __init__(
        self, opened: MoeModel, known: dict[str, dict[str, str]], *, experts: str = EXACT
    ) -> None:
        self._opened = opened
        self.known = dict(known)
        self._experts = experts

    def of(self, link: str) -> dict[str, str]:
        """Return the options of `Settings` for a link, by name."""
        if link not in self.known:
            options = self._scaled(link) if link in MACHINES else {"link": link}
            self.known[link] = options | {"experts": self._experts}
        return self.known[link]

    def _scaled(self, name: str) -> dict[str, str]:
        is_fused = self._experts == FUSED and choose_backend(self._opened) is not None
        rates = scaled_rates(self._opened, machine(name), is_fused=is_fused)
        window = scaled_window(self._opened.shape, machine(name))
        options = {
            "link": f"{rates.link:.0f}B/s",
            "near": f"{rates.near:.0f}B/s",
            "window": f"{window}B",
        }
        return options | {"machine": name}


class Bench:
    """Measures settings of one model on one text; `stored` are presets of the store, by name. Keys
    and values are kept as `kv_cache_dtype`, and `activations` are rounded to so many bits, in the
    reference of quality too. With a `draft`, as in `Settings`, the prompts are answered with such
    drafts and without, in the same measurement.
    Raises BadInput for text that the model cannot read."""

    def __init__(
        self,
        opened: MoeModel,
        artefacts: Artefacts,
        text: BenchText,
        paces: LinkEmulations,
        stored: Mapping[str, Preset] = MappingProxyType({}),
        *,
        devices: int = 1,
        kv_cache_dtype: str = AUTO,
        activations: int | None = None,
        draft: str = NONE,
    ) -> None:
        check_sequences(opened.model, text.sequences)
        self._stored = stored
        self._devices = devices
        self._kv_cache_dtype = kv_cache_dtype
        self._activations = activations
        self._draft = draft
        self._opened = opened
        self._artefacts = artefacts
        self._text = text
        self.paces = paces
        self._full: TextReading | None = None

    def read_full(self) -> None:
        """Read the text with the full model, as the reference of quality."""
        settings = Settings(
            "full",
            kv_cache_dtype=self._kv_cache_dtype,
            activations=self._activations,
            experts=FUSED if self._activations else EXACT,
        )
        with Session(self._opened, settings) as session:
            self._full = read(session, self._text.sequences, prefill=self._text.prefill)

    def loss_of_base(self, checkpoint: MoeModel) -> Quality:
        """Return the quality of the full model on this base, with keys and values as they are kept
        and activations as they are rounded, against the original checkpoint. No session may be
        open."""
        if self._full is None:
            self.read_full()
        with Session(checkpoint, Settings("full")) as session:
            return compare(
                self.full, read(session, self._text.sequences, prefill=self._text.prefill)
            )

    @property
    def num_scored(self) -> int:
        """The tokens that a measurement scores."""
        return self._text.num_decoded

    @property
    def full(self) -> TextReading:
        assert self._full is not None, "read_full comes first"
        return self._full

    def measure(
        self, setting: BenchSetting, progress: Callable[[int], None] = lambda decoded: None
    ) -> BenchSample:
        """Read the text after its first sequence has warmed the cache. Raises a Problem if the
        setting cannot run."""
        begin_s = perf_counter()
        with Session(self._opened, self._settings(setting), artefacts=self._artefacts) as session:
            self._keep_window(setting.link, session)
            read(session, self._text.sequences[:1], prefill=self._text.prefill)
            first_pass = len(session.controller.counters.passes)
            reading = read(
                session, self._text.sequences, prefill=self._text.prefill, progress=progress
            )
            sample = self._sample(session, reading, first_pass, begin_s)
        if self._draft == NONE:
            return sample
        return replace(sample, drafted=self._pairs(setting), seconds=perf_counter() - begin_s)

    def _pairs(self, setting: BenchSetting) -> DraftedPairs:
        """Answer the text's prompts without drafts and with them, each from an empty cache."""
        text = self._text
        prompts = [sequence[: text.prefill] for sequence in text.sequences]
        num_tokens = len(text.sequences[0]) - text.prefill
        told = []
        for draft in (NONE, self._draft):
            settings = replace(self._settings(setting), draft=draft)
            with Session(self._opened, settings, artefacts=self._artefacts) as session:
                told.append(answers(session, prompts, num_tokens))
        return DraftedPairs(*told)

    def scores(
        self, setting: BenchSetting, tasks: Tasks, *, batch: int | None = None
    ) -> tuple[TaskScore, ...]:
        """Return a setting's scores on tasks, from an empty cache and without timing; `batch` as in
        `evaluate`."""
        with Session(self._opened, self._settings(setting), artefacts=self._artefacts) as session:
            return evaluate(session, tasks, batch=batch)

    def _settings(self, setting: BenchSetting) -> Settings:
        preset = self._stored.get(setting.preset, setting.preset)
        return Settings(
            preset,
            budget=setting.budget,
            devices=self._devices,
            kv_cache_dtype=self._kv_cache_dtype,
            activations=self._activations,
            **self.paces.of(setting.link),
        )

    def _keep_window(self, link: str, session: Session) -> None:
        if session.parts.policies.brings_ahead and len(session.parts.slots):
            self.paces.of(link).setdefault("window", f"{session.parts.window}B")

    def _sample(
        self, session: Session, reading: TextReading, first_pass: int, begin_s: float
    ) -> BenchSample:
        sample = sample_of(
            reading,
            self.full,
            self._text,
            fast_nbytes=int(session.receipt()["fast_bytes"]),
            begin_s=begin_s,
        )
        return replace(
            sample,
            by_layer=tuple(session.controller.counters.by_layer(first_pass=first_pass)),
            exposed_ms=1e3 * sum(session.engine.stall_s[first_pass:]),
        )


def sample_of(
    reading: TextReading, full: TextReading, text: BenchText, *, fast_nbytes: int, begin_s: float
) -> BenchSample:
    """Return times, and quality against the full model, without counters and stalls. The
    measurement began at `begin_s` of `perf_counter`."""
    quality = compare(reading, full)
    kl, loss = losses_by_text(reading, full, num_texts=len(text.sequences))
    decode_s = np.reshape(reading.decode_s, (len(text.sequences), -1))
    return BenchSample(
        ttft_ms=tuple(1e3 * seconds for seconds in reading.prefill_s),
        tpot_ms=tuple((1e3 * decode_s.mean(axis=1)).tolist()),
        by_layer=(),
        exposed_ms=0.0,
        fast_nbytes=fast_nbytes,
        perplexity_ratio=quality.perplexity_ratio,
        kl=quality.kl,
        top1_agreement=quality.top1_agreement,
        kl_by_text=tuple(kl.tolist()),
        loss_by_text=tuple(loss.tolist()),
        seconds=perf_counter() - begin_s,
        loss_error=quality.loss_error,
    )
