"""Builds and owns everything a run needs, and says what was really in force."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from artifacts.errors import BadUsage
from artifacts.hardware.machines import HERE, machine
from artifacts.quantisation.replicas import check_base
from artifacts.routing.expert_maps import ExpertMaps
from artifacts.shape import FULL_BITS
from runtime.control import sizes
from runtime.control.build import build_controller, fast_tier, lay_out, pools
from runtime.control.counters import totals
from runtime.control.devices import Partitions
from runtime.control.recorder import Recorder
from runtime.control.resplit import Reconfiguration, tokens_between
from runtime.engine.engine import Engine
from runtime.engine.output import choose_output
from runtime.engine.output_cpu import CpuOutput
from runtime.engine.predictors import Predictor
from runtime.engine.routers import Watcher
from runtime.kernels.cpu.dense import CompiledLinear
from runtime.kernels.low_bit import make_ready
from runtime.model.layout import ALIGNMENT
from runtime.model.open import MoeModel, open_model
from runtime.policies import POLICIES, build
from runtime.policies.base import Artefacts, FastTier
from runtime.policies.presets import Scope, preset
from runtime.session.answers import Effort, Prompt, Stream, encode
from runtime.session.devices import devices_for, resolve_device
from runtime.session.equip import equipped
from runtime.session.fallbacks import fallbacks
from runtime.session.generate import Sampling, Token, stream
from runtime.session.limits import check_tokens
from runtime.session.link_choice import link_name, resolve_link
from runtime.session.probe import link_bytes_per_second, prefetch_window, scaled_window
from runtime.session.receipt import receipt
from runtime.session.settings import FUSED, Settings
from runtime.session.turns import Turns
from runtime.tiers.open import open_tiers
from runtime.tiers.replicas import open_replicas, verify_files
from runtime.tiers.shadow_replicas import Shadows
from runtime.tiers.slots import Slots


class Output(Protocol):
    """Of one pass: logits [B, S, V], and what the next pass goes on from."""

    logits: torch.Tensor
    past_key_values: object


class Session:
    """A model that runs at a budget. A context manager; once closed, the opened model can be used again.

    Any thread may ask: requests take turns. One that fails leaves an empty fast tier behind, and nothing else.
    """

    def __init__(self, opened: MoeModel, settings: Settings, *, artefacts: Artefacts | None = None) -> None:
        self._turns, self._undo = Turns(), ExitStack()
        try:
            self._build(opened, settings, artefacts)
        except BaseException:
            self.close()
            raise

    def _build(self, opened: MoeModel, settings: Settings, artefacts: Artefacts | None) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.opened, self.settings = opened, settings
        chosen, shape = preset(settings.preset), opened.shape
        self.policies, artefacts = build(settings.texts()), artefacts or Artefacts()
        if settings.verify and artefacts.replicas:
            verify_files(artefacts.replicas)
        if settings.learn:
            artefacts = self._learning(artefacts)
        self.maps_run = artefacts.maps_run
        self.scope = Scope(settings.scope or chosen.scope)
        self.budget = chosen.budget or settings.budget
        self.partitions = partitions = Partitions(shape.num_experts, settings.devices)
        self.devices = devices_for(opened, settings.devices)
        named = settings.machine or settings.scaled_to
        self.fast = fast = fast_tier(
            self.policies,
            shape,
            self.budget,
            scope=self.scope,
            artefacts=artefacts,
            machine=named or HERE,
            link=None if named else link_name(opened, settings.link),
            num_devices=settings.devices,
        )
        num_slots = fast.num_slots
        window = sizes.nbytes(settings.window) if settings.window else None
        self.fused = choose_output(opened, num_devices=settings.devices)
        is_asked = settings.experts == FUSED and self.fused is not None
        # The sum over the halves of an expert is not the module's to the bit in torch either, but farther from it.
        # On a GPU nobody has seen the kernels run, and they are taken when they are asked for.
        self.is_fused = is_asked or fast.split is not None and self.fused is CpuOutput
        self._dense = CompiledLinear(opened) if is_asked else None
        choice = resolve_link(
            opened, link=settings.link, near=settings.near, scaled_to=settings.scaled_to, is_fused=is_asked
        )
        shared = pools(
            self.policies, shape, num_slots=num_slots, scope=self.scope, split=fast.split, partitions=partitions
        )
        is_plain = opened.base == FULL_BITS and not self.is_fused
        self.slots = Slots(shared, self.devices, parts=opened.store.layout.parts if is_plain else ())
        self.shadows = self._shadows(fast, artefacts)
        replicas = open_replicas(opened, artefacts.replicas, self.policies.widths)
        self.tiers = open_tiers(opened, choice, replicas, split=fast.split, devices=self.devices)
        self._undo.callback(self.tiers.link.close)
        self.window = self._measured_window() if window is None else window
        self.controller = build_controller(
            self.policies,
            shape,
            num_slots=num_slots,
            shadows=fast.shadows,
            split=fast.split,
            scope=self.scope,
            window=self.window,
            artefacts=artefacts,
            num_devices=settings.devices,
        )
        self.watcher = Watcher(opened)
        self._undo.callback(self.watcher.stop)
        self._watch_routers(artefacts)
        self.engine = Engine(
            opened,
            self.controller,
            self.watcher,
            tiers=self.tiers,
            slots=self.slots,
            shadows=self.shadows,
            is_fused=self.is_fused,
        )
        self.engine.install()
        self._undo.callback(self.engine.uninstall)
        if self._dense:
            self._undo.callback(self._dense.uninstall)
            self._dense.install()
        self.matching = self.policies.matching
        if self.matching:
            self._undo.callback(self.matching.close)
            self.matching.run_in_background()
            self.watcher.on_embedding = self.matching.begin
        self._next_request = 0
        make_ready(self.computed_widths, opened.model.device)
        self.reconfiguration = self._reconfiguration()
        self.fallbacks = fallbacks(self, choice)

    @classmethod
    def open(
        cls,
        name: str | Path,
        settings: Settings | None = None,
        *,
        store: str | Path | None = None,
        base: int = FULL_BITS,
    ) -> "Session":
        """Open a checkpoint (folder or hub id) and run it by `settings`, with what `store` knows of it; on a `base` of
        so many bits its replicas are the experts.

        Raises BadUsage, BadInput for a model or a store that cannot be used, Incompatible for an artefact that the
        policies cannot do without, OutOfResources.
        """
        settings = settings or Settings()
        check_base(base)
        opened = open_model(str(name), device=resolve_device(settings.device))
        return cls.over(opened, settings, store=store, base=base, name=str(name))

    @classmethod
    def over(
        cls,
        opened: MoeModel,
        settings: Settings,
        *,
        store: str | Path | None = None,
        base: int = FULL_BITS,
        name: str = "this model",
    ) -> "Session":
        """The same over a model that is open and that no other session has, `name` as the user gave it."""
        path = None if store is None else Path(store)
        opened, settings, artefacts = equipped(opened, settings, name=name, store=path, base=base)
        return cls(opened, settings, artefacts=artefacts)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the model back, and the fast tier free; stops what is being generated. Once is enough."""
        self._turns.close()
        self._undo.close()

    def validate(self) -> None:
        """Raise AssertionError where, between passes, something contradicts itself, or the budget."""
        self.engine.validate()
        nbytes = self.slots.nbytes + (self.shadows.nbytes if self.shadows else 0)
        budget = sizes.budget_nbytes(self.budget, self.opened.shape)
        borders = ALIGNMENT * (len(self.slots) + 1)
        assert nbytes <= budget + borders, f"{nbytes} bytes of fast tier, the budget is {budget}"

    # Running

    def forward(self, ids: torch.Tensor, *, mask: torch.Tensor | None = None, past: object = None) -> Output:
        """One pass, prefill or decode: ids [B, S], mask [B, past + S]. Returns the model's output, logits [B, S, V].

        Raises BadInput for what the model cannot take.
        """
        with self._turns.lock, torch.inference_mode():
            self._turns.check()
            self._check(ids, past)
            return self.opened.model(
                input_ids=ids.to(self.opened.model.device),
                attention_mask=None if mask is None else mask.to(self.opened.model.device),
                past_key_values=past,
                use_cache=True,
            )

    def _check(self, ids: torch.Tensor, past: object) -> None:
        """What is on a GPU already is not fetched to be looked at."""
        highest = int(ids.max()) if ids.device.type == "cpu" and ids.numel() else 0
        length = ids.shape[1] + (past.get_seq_length() if past is not None else 0)
        check_tokens(self.opened.model, highest=highest, length=length, what=f"{length} tokens")

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Stream:
        """Text after a text, or after the turns of a chat, as it comes. Raises BadInput for what cannot be encoded."""
        return Stream(self, self.encode(prompt), sampling or Sampling())

    def encode(self, prompt: Prompt) -> torch.Tensor:
        """Token ids [1, S]; of a chat by the tokenizer's template. Without one turns are separated by blank lines, and
        the receipt says so. Raises BadInput."""
        return encode(self, prompt)

    def generate(
        self, prompt: torch.Tensor, sampling: Sampling, *, told: Callable[[Effort], None] | None = None
    ) -> Iterator[Token]:
        """Stream tokens after `prompt` [1, S]; whoever comes meanwhile waits until all of them are there. `told` hears
        then what they took."""
        turn = partial(self._turn, told=told)
        yield from stream(self.opened.model, prompt.to(self.opened.model.device), sampling, turn=turn)

    def new_requests(self, count: int) -> None:
        """The rows of coming passes are `count` new requests; no earlier one goes on."""
        if self.reconfiguration:
            self.reconfiguration.between_requests()
        self.watcher.first_request = self._next_request
        self._next_request += count

    @property
    def num_passes(self) -> int:
        return len(self.controller.counters.passes)

    def effort(self, *, first_pass: int = 0) -> Effort:
        """What the passes from `first_pass` on took, all of them since it was opened by default."""
        counters, stall_s = self.controller.counters, sum(self.engine.stall_s[first_pass:])
        by_layer = counters.by_layer(first_pass=first_pass)
        return Effort(totals(by_layer), by_layer, stall_s * 1e3)

    def fold(self) -> None:
        """Count all passes so far as one: a run that goes on and on would keep a table of each."""
        with self._turns.lock:
            self.engine.fold()

    def record(self) -> Recorder:
        """Write down every step from here on, with all that a replay needs."""
        recorder = Recorder()
        self.watcher.see_probabilities()
        self.watcher.see_embeddings()
        self._watch(recorder)
        return recorder

    def receipt(self) -> dict[str, object]:
        """What was really in force."""
        return receipt(self)

    @contextmanager
    def _turn(self, stop: threading.Event, *, told: Callable[[Effort], None] | None) -> Iterator[bool]:
        """Of one generation; whether it came before `stop` was set. `told` hears what it took."""
        if not self._turns.begin(stop):
            yield False
            return
        try:
            self.new_requests(1)
            first_pass = self.num_passes
            yield True
            if told:
                told(self.effort(first_pass=first_pass))
        finally:
            self._turns.end()

    def _watch_routers(self, artefacts: Artefacts) -> None:
        """See what the policies want to see."""
        watcher, prefetch = self.watcher, self.policies.prefetch
        if prefetch.reads_predictions:
            watcher.see_predictions(prefetch.distance)
        if prefetch.reads_learned:
            ahead = min(prefetch.distance, self.opened.shape.num_layers)
            watcher.see_predictions(0, Predictor(artefacts.predictors, ahead, self.opened.model.device))
        if any(getattr(self.policies, axis).sees_probabilities for axis in POLICIES):
            watcher.see_probabilities()
        if self.controller.sees_embeddings:
            watcher.see_embeddings()

    def _reconfiguration(self) -> Reconfiguration | None:
        """Of a split that is solved anew as the run goes on, told of every step."""
        settings = self.settings
        every = tokens_between(settings.reconfigure_every, self.fast.split, self.policies, num_devices=settings.devices)
        if not every:
            return None
        found = Reconfiguration(self.policies, self.opened.shape, self.fast.split, every=every, lay_out=self._lay_out)
        self._watch(found)
        return found

    def _lay_out(self, fast: FastTier) -> None:
        """Begin anew with an empty fast tier, another split of the same budget."""
        self.engine.release_slots()
        try:
            self.fast = fast
            shared = lay_out(self.controller, self.policies, fast, self.scope)
            self.tiers.slow.segments.cut(fast.split)
            self.tiers.slow.cut()
            del self.slots  # the budget has no room for both
            self.slots = Slots(shared, self.devices)
            self.engine.lay_out(self.slots)
        except BaseException:
            self._turns.is_closed = True  # there is nothing to run in any more
            raise

    def _watch(self, observer: Recorder | Reconfiguration) -> None:
        """Tell it of every pass and step from here on, beside those that are told already."""
        watcher = self.watcher
        watcher.on_pass = _both(watcher.on_pass, observer.begin_pass)
        watcher.on_step = _both(watcher.on_step, observer.add)

    def _shadows(self, fast: FastTier, artefacts: Artefacts) -> Shadows | None:
        if fast.shadows is None:
            return None
        if self.slots.are_apart:
            raise BadUsage("replicas that stay are all on one GPU: leave out --devices, or choose another --residency")
        stores = open_replicas(self.opened, artefacts.replicas, sorted(set(fast.shadows.tolist())))
        return Shadows(stores, fast.shadows, self.opened.model.device)

    @property
    def computed_widths(self) -> list[int]:
        """Bits at which experts are computed below the checkpoint's precision."""
        resident = () if self.fast.shadows is None else self.fast.shadows.tolist()
        return sorted({self.opened.base, *self.policies.widths, *resident} - {FULL_BITS})

    def _learning(self, artefacts: Artefacts) -> Artefacts:
        shape, hidden = self.opened.shape, self.opened.model.get_input_embeddings().weight.shape[1]
        empty = ExpertMaps.empty(num_layers=shape.num_layers, num_experts=shape.num_experts, hidden=hidden)
        return replace(artefacts, maps=empty if artefacts.maps is None else artefacts.maps, learns_maps=True)

    def _measured_window(self) -> int:
        if not self.policies.brings_ahead or not len(self.slots):
            return 0
        if self.settings.scaled_to:
            return scaled_window(self.opened.shape, machine(self.settings.scaled_to))
        num_experts, num_devices = self.partitions.num_experts, self.partitions.count
        measured = self.tiers.bandwidth or link_bytes_per_second(
            self.tiers.link, self.slots.alike(), num_experts, num_devices=num_devices
        )
        return prefetch_window(self.opened, measured, is_fused=self.is_fused, dense=self._dense)


def _both(first: Callable[[Any], None] | None, second: Callable[[Any], None]) -> Callable[[Any], None]:
    """One after the other, where there is a first."""
    if first is None:
        return second

    def told(what: Any) -> None:
        first(what)
        second(what)

    return told
