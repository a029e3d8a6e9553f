"""Builds and owns everything a run needs: policies, cache, link, near tier, engine; and says what was really in
force."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType

import torch

from artifacts.errors import BadUsage
from artifacts.hardware import machine
from runtime import budget as sizes
from runtime.assembly import build_controller, check_required
from runtime.cache import Scope
from runtime.controller import Controller
from runtime.cudalink import CudaLink
from runtime.emulation import scaled_rates
from runtime.engine import Engine
from runtime.generate import Sampling, Token, stream
from runtime.link import DiskLink, EmulatedLink, Link
from runtime.model import MoeModel, open_model
from runtime.near import NearTier
from runtime.policies import POLICIES, build, describe, preset
from runtime.policies.base import Artefacts
from runtime.recorder import Recorder
from runtime.weights import RamStore, aligned


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may choose. `policies` overrides a preset's axes; texts are those of the command line."""

    preset: str = "on-demand"
    policies: dict[str, str] = field(default_factory=dict)
    budget: str = "25%"
    scope: str | None = None
    link: str = "auto"
    near: str | None = None
    scaled_to: str | None = None
    window: str | None = None
    device: str = "auto"
    threads: int | None = None  # of CPU compute; None leaves torch as it is

    def __post_init__(self) -> None:
        if self.scaled_to and (self.link != "auto" or self.near):
            raise BadUsage("--scaled-to sets the link and the near tier itself: leave out --link and --near")
        if self.scope not in (None, *Scope):
            raise BadUsage(f"scope is layer or global, not {self.scope!r}")

    def texts(self) -> dict[str, str]:
        """The text of every axis."""
        return preset(self.preset).texts() | self.policies

    @property
    def requires(self) -> frozenset[str]:
        """Artefacts that the chosen policies cannot do without."""
        return build(self.texts()).requires


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises BadUsage for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BadUsage("no CUDA device is visible: use --device cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise BadUsage(f"device {name!r} is not known: use auto, cpu or cuda") from None


class Session:
    """A model that runs at a budget. Use as a context manager, or `close()` it; the opened model can be used again
    after."""

    def __init__(self, opened: MoeModel, settings: Settings, *, artefacts: Artefacts | None = None) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.opened, self.settings = opened, settings
        self.fallbacks: list[str] = []
        chosen = preset(settings.preset)
        self.policies = build(settings.texts())
        artefacts = artefacts or Artefacts()
        check_required(self.policies, artefacts)
        self.scope = Scope(settings.scope or chosen.scope)
        self._budget = chosen.budget or settings.budget
        self.device = opened.model.device
        self._open_tiers()
        self.controller = self._build_controller(artefacts)
        num_slots = self.controller.cache.num_slots
        self.slots = self._allocate(num_slots * self._layout.nbytes).view(num_slots, self._layout.nbytes)
        self.engine = Engine(opened, self.controller, link=self.link, near=self.near, slots=self.slots)
        self.engine.distance = self.policies.prefetch.distance
        self.engine.wants_probabilities = any(getattr(self.policies, axis).sees_probabilities for axis in POLICIES)
        self.engine.install()

    @classmethod
    def open(cls, name: str, settings: Settings, *, artefacts: Artefacts | None = None) -> "Session":
        """Open a checkpoint (folder or hub id) and run it by `settings`."""
        return cls(open_model(name, device=resolve_device(settings.device)), settings, artefacts=artefacts)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the model back, and the fast tier free."""
        self.engine.uninstall()
        self.link.close()
        self.near.close()

    # Running

    def forward(self, ids: torch.Tensor, *, mask: torch.Tensor | None = None, past: object = None) -> object:
        """One pass, prefill or decode: ids [B, S], mask [B, past + S]. Returns the model's output, logits [B, S, V]."""
        with torch.inference_mode():
            return self.opened.model(
                input_ids=ids.to(self.device),
                attention_mask=None if mask is None else mask.to(self.device),
                past_key_values=past,
                use_cache=True,
            )

    def generate(self, prompt: torch.Tensor, sampling: Sampling) -> Iterator[Token]:
        """Stream tokens after `prompt` [1, S]. One generation at a time."""
        self.new_requests(1)
        yield from stream(self.opened.model, prompt.to(self.device), sampling)

    def new_requests(self, count: int) -> None:
        """The rows of coming passes are `count` new requests."""
        self.engine.first_request = self._next_request
        self._next_request += count

    def record(self) -> Recorder:
        """Write down every step from here on, with all that a replay needs."""
        recorder = Recorder()
        self.engine.wants_probabilities = True
        self.engine.on_step, self.engine.on_pass = recorder.add, recorder.begin_pass
        return recorder

    def receipt(self) -> dict[str, object]:
        """What was really in force."""
        cache = self.controller.cache
        return {
            "model": self.opened.config.name_or_path or self.opened.family,
            "family": self.opened.family,
            "dtype": str(self._layout.dtype).removeprefix("torch."),
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            "preset": self.settings.preset,
            "policies": {axis: describe(getattr(self.policies, axis)) for axis in POLICIES},
            "scope": str(self.scope),
            "slots": cache.num_slots,
            "experts": cache.shape.num_keys,
            "expert_bytes": cache.shape.expert_nbytes,
            "fast_bytes": self.slots.numel(),
            "pinned_bytes": self._pinned_nbytes,
            "prefetch_window_bytes": self._window,
            "link": self.link.conditions(),
            "near": self.near.conditions(),
            "scaled_to": self.settings.scaled_to,
            "fallbacks": list(self.fallbacks),
        }

    # Building

    @property
    def _layout(self):
        return self.opened.store.layout

    def _open_tiers(self) -> None:
        shape = self.opened.shape
        self._next_request = 0
        kind = self._link_kind()
        on_disk = kind == "disk"
        pin = kind == "cuda"
        self._pinned_nbytes = shape.nbytes if pin else 0
        store = self.opened.store if on_disk else RamStore(self.opened.store, pin=pin)
        bandwidth, latency_s, near = self._rates(kind)
        self.near = NearTier(store, bandwidth=near)
        self.link = self._open_link(kind, store, bandwidth, latency_s)

    def _link_kind(self) -> str:
        text = self.settings.link
        if self.settings.scaled_to:
            return "emulated"
        if text == "auto":
            return "cuda" if self.device.type == "cuda" else "disk"
        if text == "cuda" and self.device.type != "cuda":
            raise BadUsage("--link cuda needs the model on a CUDA device: use --link disk, or a rate such as 5GB/s")
        return text if text in ("disk", "cuda") else "emulated"

    def _rates(self, kind: str) -> tuple[float, float, float | None]:
        """Link bandwidth and latency, near bandwidth; zero and None where nothing is emulated."""
        near = sizes.rate(self.settings.near)[0] if self.settings.near else None
        if self.settings.scaled_to:
            scaled = scaled_rates(self.opened, machine(self.settings.scaled_to))
            return scaled.link, 0.0, scaled.near
        bandwidth, latency_s = sizes.rate(self.settings.link) if kind == "emulated" else (0.0, 0.0)
        return bandwidth, latency_s, near

    def _open_link(self, kind: str, store: object, bandwidth: float, latency_s: float) -> Link:
        shape = self.opened.shape
        if kind == "emulated":
            return EmulatedLink(store, shape, bandwidth=bandwidth, latency_s=latency_s)
        if self.device.type == "cuda":
            return CudaLink(store, shape, device=self.device, slot_nbytes=self._layout.nbytes)
        return DiskLink(store, shape)

    def _build_controller(self, artefacts: Artefacts) -> Controller:
        shape = self.opened.shape
        num_slots = sizes.num_slots(self._budget, shape, per_layer=self.scope is Scope.LAYER)
        if num_slots == shape.num_keys:
            self.fallbacks.append(f"budget {self._budget} holds the whole model: every expert stays resident")
        self._window = sizes.nbytes(self.settings.window) if self.settings.window else shape.top_k * shape.expert_nbytes
        return build_controller(
            self.policies, shape, num_slots=num_slots, scope=self.scope, window=self._window, artefacts=artefacts
        )

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return aligned(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
