"""Prices shortcuts: what each loses against the full model, and the bytes over the link that it
saves against exact loading, in the same live run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from torch.nn import functional as F

from artifacts.errors import BadUsage
from artifacts.shape import FULL_BITS, Shape
from profilers.compare.bench import BenchText
from profilers.compare.quality import TextReading, lost_by_token, read
from profilers.routing.saliency import least_salient
from profilers.text.batches import check_sequences
from runtime.control import sizes
from runtime.control.counters import Counter
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.policies.presets import preset
from runtime.policies.routing.pruned import Pruned
from runtime.session.equip import model_on_base
from runtime.session.session import Session, Settings

_MOVED = (Counter.DEMAND_BYTES, Counter.PREFETCH_BYTES)


@dataclass(frozen=True, slots=True)
class Shortcut:
    """A way to load less, which loses: `policies` by axis, and the bits of all experts. Shortcuts
    of one `family` are the same at other strengths."""

    name: str
    family: str
    policies: Mapping[str, str] = field(default_factory=dict)
    base: int = FULL_BITS

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(self.policies) | ({"base"} if self.base != FULL_BITS else frozenset())

    def mixed_with(self, other: "Shortcut") -> "Shortcut":
        """Return both at once; they share no axis."""
        return Shortcut(
            f"{self.name} + {other.name}",
            f"{self.family} + {other.family}",
            {**self.policies, **other.policies},
            min(self.base, other.base),
        )


EXACT = Shortcut("exact loading", "exact")
_MISSES = {
    "drop": ("drop:rank=3", "drop:rank=2", "drop:rank=1"),
    "adaptive drop": ("drop:rank=1,renormalise=yes,tolerance=0.01",),
    "zero": ("zero",),
    "fewer experts": ("drop:rank=3,always=yes", "drop:rank=2,always=yes"),
    "buddy": ("buddy:keep=0.5", "buddy"),
    "substitute": ("substitute",),
    "best_resident": ("best_resident",),
    "random_resident": ("random_resident",),
    "fetch_lowest": ("fetch_lowest",),
    "fetch_priority": ("fetch_priority",),
    "cascade": ("cascade",),
}
_STRENGTHS = (0.1, 0.2, 0.4)
_PRUNED = (0.125, 0.25, 0.5)
_BASES = (4, 3, 2)


def shortcuts(shape: Shape, scores: np.ndarray, *, seed: int) -> list[Shortcut]:
    """Return the shortcuts, by family and rising strength. `scores` [L, E] are REAP's:
    they choose what is pruned, and the layer that is skipped, that of the least sum."""
    found = [*_of_misses(shape.top_k, seed)]
    for strength in _STRENGTHS:
        text = f"cache_aware:strength={strength:g}"
        found.append(Shortcut(text, "cache_aware", {"routing": text}))
    found += _pruned(shape, scores)
    layer = int(scores.sum(axis=1).argmin())
    skip = {"miss": f"drop:rank=0,always=yes,layer={layer}"}
    found.append(Shortcut(f"layer {layer} skipped", "skipped layer", skip))
    shadow = {"miss": "shadow", "residency": "shadow"}
    found.append(Shortcut("shadow", "shadow", shadow))
    return found + [Shortcut(f"{bits} bits for all", "bits", base=bits) for bits in _BASES]


def _of_misses(top_k: int, seed: int) -> Iterator[Shortcut]:
    for family, texts in _MISSES.items():
        for text in texts:
            policy = f"{text}:seed={seed}" if text == "random_resident" else text
            if _names_a_rank(text, top_k):
                yield Shortcut(text, family, {"miss": policy})


def _pruned(shape: Shape, scores: np.ndarray) -> Iterator[Shortcut]:
    for share in _PRUNED:
        if round(shape.num_experts * (1 - share)) >= shape.top_k:
            policy = f"pruned:experts={Pruned.of(least_salient(scores, share)).experts}"
            yield Shortcut(f"pruned {share:.1%}", "pruned", {"routing": policy})


def _names_a_rank(text: str, top_k: int) -> bool:
    """Return whether a policy's rank, if it names one, is one of the `top_k`."""
    _, _, rank = text.partition("rank=")
    return not rank or int(rank.partition(",")[0]) < top_k


@dataclass(frozen=True, slots=True)
class Price:
    """One shortcut: nats lost and KL divergence a decoded token, bytes that it moves and saves a
    token, its share of the bytes of exact loading, and nats for each tenth of these bytes. Errors
    are standard errors over texts, of readings paired by token; a price is None where nothing is
    saved."""

    shortcut: Shortcut
    loss: float
    loss_error: float
    kl: float
    nbytes: float
    saved_nbytes: float
    saved_share: float
    price: float | None
    price_error: float | None


class Pricing:
    """Prices shortcuts of a model on one text, within `budget` and as `name` loads, a preset that
    loses nothing. Raises BadInput for text that the model cannot read, BadUsage for a preset that
    loses something and for fewer than two texts, which tell no error."""

    def __init__(
        self,
        opened: MoeModel,
        artefacts: Artefacts,
        text: BenchText,
        *,
        name: str = "on-demand",
        budget: str = "25%",
    ) -> None:
        check_sequences(opened.model, text.sequences)
        if not preset(name).is_lossless:
            raise BadUsage(f"preset {name} loses something itself: give one that is lossless")
        if len(text.sequences) < 2:
            raise BadUsage("one text tells no error: give more --tokens, or a smaller --length")
        self._opened = opened
        self._artefacts = artefacts
        self._text = text
        self._name = name
        self._budget = f"{sizes.budget_nbytes(budget, opened.shape)}"
        with Session(opened, Settings("full")) as session:
            self._full = read(session, text.sequences, prefill=text.prefill)
        self._exact = self._measure(EXACT)

    def price(self, shortcut: Shortcut) -> Price:
        """Return the price of a shortcut. Raises a Problem if it cannot run."""
        lost, kl, nbytes = self._exact if shortcut is EXACT else self._measure(shortcut)
        exact_nbytes = self._exact[2]
        saved = exact_nbytes - nbytes
        price, price_error = _ratio(lost, saved, exact_nbytes.mean() / 10)
        return Price(
            shortcut,
            loss=float(lost.mean()),
            loss_error=_error(lost),
            kl=float(kl.mean()),
            nbytes=float(nbytes.mean()),
            saved_nbytes=float(saved.mean()),
            saved_share=float((saved / exact_nbytes.mean()).mean()),
            price=price,
            price_error=price_error,
        )

    def _measure(self, shortcut: Shortcut) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return nats lost, KL divergence and bytes a decoded token of each text; prompts fill the
        cache, and lose as well, but are not counted."""
        opened, artefacts = model_on_base(self._opened, self._artefacts, shortcut.base)
        settings = Settings(self._name, dict(shortcut.policies), budget=self._budget)
        sequences = self._text.sequences
        with Session(opened, settings, artefacts=artefacts) as session:
            reading = read(session, sequences, prefill=self._text.prefill)
            moved = _moved_nbytes(session)
        decoded = moved.reshape(len(sequences), -1)[:, 1:]  # behind the pass of the prompt
        lost, kl = self._losses(reading)
        return lost, kl, decoded.mean(axis=1)

    def _losses(self, reading: TextReading) -> tuple[np.ndarray, np.ndarray]:
        mine, theirs = (F.log_softmax(one.logits, dim=-1) for one in (reading, self._full))
        kl = F.kl_div(mine, theirs, log_target=True, reduction="none").sum(-1)
        lost = lost_by_token(mine, theirs, self._full.targets)
        by_text = (values.double().view(len(self._text.sequences), -1) for values in (lost, kl))
        return tuple(values.mean(1).numpy() for values in by_text)


def _moved_nbytes(session: Session) -> np.ndarray:
    """Return the bytes over the link of each pass."""
    counters = session.controller.counters
    counters.catch_up()
    return np.array([int(table[list(_MOVED)].sum()) for table in counters.passes])


def _ratio(
    lost: np.ndarray, saved: np.ndarray, unit: float
) -> tuple[float, float] | tuple[None, None]:
    """Return what is lost for each unit that is saved, and the standard error of this ratio of
    means, to first order; None where nothing is saved."""
    if not saved.mean() > 0:
        return None, None
    ratio = lost.mean() / saved.mean()
    return float(ratio * unit), _error(lost - ratio * saved) / float(saved.mean()) * unit


def _error(by_text: np.ndarray) -> float:
    return float(by_text.std(ddof=1) / len(by_text) ** 0.5)


def mixtures(prices: Sequence[Price], most: int) -> list[Shortcut]:
    """Return mixtures of two, at most `most`, those of the lowest prices first: each family's
    cheapest with each other's that leaves its axes alone."""
    saving = [one for one in prices if one.price is not None and one.saved_share > 0.01]
    saving.sort(key=lambda one: one.price)
    cheapest: dict[str, Price] = {}
    for one in saving:
        cheapest.setdefault(one.shortcut.family, one)
    pairs = [
        pair
        for pair in combinations(cheapest.values(), 2)
        if not pair[0].shortcut.axes & pair[1].shortcut.axes
    ]
    pairs.sort(key=lambda pair: pair[0].price + pair[1].price)
    return [one.shortcut.mixed_with(other.shortcut) for one, other in pairs[:most]]


def front(prices: Iterable[Price]) -> list[Price]:
    """Return the prices that no other beats, by rising saving: none is as near to the full model by
    KL divergence and saves as much. A loss of likelihood is also below 0 by chance."""
    best: list[Price] = []
    for one in sorted(prices, key=lambda one: (-one.saved_nbytes, one.kl)):
        if not best or one.kl < best[-1].kl:
            best.append(one)
    return best[::-1]
