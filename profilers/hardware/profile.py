"""Measures a machine with a model: parts of a pass by number of tokens, loads by link, experts in
the near tier.

The code of a run is measured: the model's own layers, the engine, the links, the near tier's
arithmetic.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from artifacts.hardware.profile import Compute, HardwareProfile, NearCompute, Spread
from artifacts.quantisation.replicas import Replicas
from artifacts.shape import FULL_BITS
from profilers.hardware.load_times import THOROUGH, TimingEffort, loads, num_few
from profilers.hardware.policy_overhead import deciding, misses_of, places_a_layer
from profilers.hardware.this_machine import LocalMachine
from runtime.devices import kind_of
from runtime.engine.engine import NAME
from runtime.kernels.replica_linear import make_ready
from runtime.model.arithmetic import accumulate, assign, expert_forward, gather, weigh
from runtime.model.files.expert_store import DiskStore
from runtime.model.layout import aligned
from runtime.model.open import MoeModel
from runtime.session.link_choice import link_name
from runtime.session.probe import seconds_of, without_experts
from runtime.session.session import Session, Settings
from runtime.session.settings import EXACT
from runtime.tiers.replica_store import ReplicaStore, open_replicas

_CONTEXT = 64  # tokens before a decoded token
_NEAR_TOKENS = (1, 16)
_CPU = torch.device("cpu")


def measure(
    opened: MoeModel,
    folder: Path,
    *,
    link: str = "auto",
    replicas: Replicas | None = None,
    effort: TimingEffort = THOROUGH,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> HardwareProfile:
    """Measure the whole profile. `folder` holds the checkpoint; `link` is the link of a run, and a
    rate is emulated; `replicas` give the widths to compute in the near tier. Raises BadUsage for a
    link that is not understood."""
    of_run = link_name(opened, link)
    before = LocalMachine.look(opened.model.device)
    limit = getattr(opened.config, "max_position_embeddings", None) or max(effort.lengths)
    lengths = [1, *sorted({length for length in effort.lengths if 1 < length <= limit})]
    widths = [FULL_BITS, *(replicas.widths if replicas else ())]
    total = len(lengths) + 1 + len(widths)
    done = 0
    compute = []
    near = []
    of_decode, of_misses = decode_experts(opened, link, effort)
    for length in lengths:
        moe = of_decode if length == 1 else _prompt_experts(opened, length, effort)
        compute.append(_compute(opened, length, moe, effort))
        progress(done := done + 1, total)
    of_links = loads(opened, folder, of_run, effort)
    measured = tuple(
        replace(load, **of_misses) if load.link == of_run else load for load in of_links
    )
    progress(done := done + 1, total)
    for bits in widths:
        near += _near(opened, bits, replicas, effort)
        progress(done := done + 1, total)
    conditions = _conditions(opened, before, of_run, effort)
    if effort.deciding:
        conditions["deciding"] = deciding(opened, link, tokens=effort.deciding)
    return HardwareProfile(tuple(compute), measured, tuple(near), conditions)


# Computing


def _compute(opened: MoeModel, num_tokens: int, moe: Spread, effort: TimingEffort) -> Compute:
    return Compute(
        num_tokens,
        attention=layer_seconds(opened, num_tokens, effort),
        moe=moe,
        head=head_seconds(opened, num_tokens, effort),
        expert=expert_spread(opened, num_tokens, effort),
    )


def layer_seconds(
    opened: MoeModel, num_tokens: int, effort: TimingEffort, *, after: str = "eager"
) -> Spread:
    """Measure a layer without its experts: the time of the model's body over its layers. A single
    token is decoded after a context. `after` is the experts implementation to restore."""
    body = opened.model.base_model
    device = opened.model.device
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    with without_experts(opened, after=after), torch.inference_mode():
        context: dict[str, object] = {}
        if num_tokens == 1:
            past = body(
                input_ids=ids.expand(1, _context(opened, effort)), use_cache=True
            ).past_key_values
            context = {"past_key_values": past, "use_cache": True}
        seconds = _seconds(opened, lambda _: body(input_ids=ids, **context), effort)
    return Spread.of([pass_s / opened.shape.num_layers for pass_s in seconds])


def _context(opened: MoeModel, effort: TimingEffort) -> int:
    """Return the tokens of the context: as many as leave positions for the measured tokens."""
    limit = getattr(opened.config, "max_position_embeddings", None) or 1 << 20
    return max(1, min(_CONTEXT, limit - effort.turns - effort.warm_up))


def head_seconds(opened: MoeModel, num_tokens: int, effort: TimingEffort) -> Spread:
    head = opened.model.get_output_embeddings()
    hidden = _hidden(opened, num_tokens)[None].to(head.weight.dtype)
    return Spread.of(_seconds(opened, lambda _: head(hidden), effort))


def expert_spread(opened: MoeModel, num_tokens: int, effort: TimingEffort) -> Spread:
    module = opened.layers[0].experts
    views = _few(opened)
    x = _hidden(opened, num_tokens)
    project = opened.store.layout.project

    def compute(turn: int) -> torch.Tensor:
        return expert_forward(module, views[turn % len(views)], x, project=project)

    return Spread.of(_seconds(opened, compute, effort))


def decode_experts(
    opened: MoeModel, link: str, effort: TimingEffort, *, experts: str = EXACT
) -> tuple[Spread, dict[str, Spread]]:
    """Return the seconds of a layer's experts in a pass of one token when all are resident, and the
    seconds that a miss adds: as `miss`, and as `host` without the stall. There are none of these
    where there are no misses.

    Two tokens are decoded with a fast tier that holds just the experts of both, so some are loaded.
    Then both are decoded again, with all experts resident but no longer in the processor's caches.
    With few experts it is one token. A pass without experts follows each time, so that all are
    measured under the same load of the machine.
    """
    shape = opened.shape
    random = np.random.default_rng(0)
    resident = []
    added = []
    worked = []
    places = places_a_layer(opened)
    settings = Settings(budget=f"{shape.num_layers * places}x", link=link, experts=experts)
    with Session(opened, settings) as session, torch.inference_mode():
        # makes the controller decide even where the whole model fits
        session.watcher.on_step = _ignore
        for turn in range(effort.warm_up + effort.turns):
            drawn = random.integers(0, opened.config.vocab_size, (places // shape.top_k, 1, 1))
            tokens = [token.to(opened.model.device) for token in torch.from_numpy(drawn)]
            loading_s = sum(pass_seconds(session, token) for token in tokens)
            stall_s = sum(session.engine.stall_s[-len(tokens) :])
            resident_s = sum(pass_seconds(session, token) for token in tokens)
            num_misses = misses_of(session, 2 * len(tokens))
            with without_experts(opened, after=NAME):
                # caches are colder in the first
                bare_s = min(pass_seconds(session, tokens[0]) for _ in range(2))
            if turn >= effort.warm_up:
                resident.append((resident_s / len(tokens) - bare_s) / shape.num_layers)
                added += [(loading_s - resident_s) / num_misses] if num_misses else []
                worked += [(loading_s - stall_s - resident_s) / num_misses] if num_misses else []
    return Spread.of(resident), {"miss": Spread.of(added), "host": Spread.of(worked)} if len(
        added
    ) > 1 else {}


def pass_seconds(session: Session, token: torch.Tensor) -> float:
    return seconds_of(lambda _: session.forward(token), token.device, warm_up=0, turns=1)[0]


def _ignore(step: object) -> None:
    pass


def _prompt_experts(opened: MoeModel, num_tokens: int, effort: TimingEffort) -> Spread:
    """Measure a layer's experts on tokens that select all experts evenly, as a prompt nearly does.
    The weights of a few experts serve for all in turns."""
    shape = opened.shape
    device = opened.model.device
    module = opened.layers[0].experts
    views = _few(opened)
    hidden = _hidden(opened, num_tokens)
    project = opened.store.layout.project
    scores = np.random.default_rng(0).random((num_tokens, shape.num_experts))
    selected = np.argsort(scores, axis=1)[:, : shape.top_k]
    weights = torch.full(
        (num_tokens, shape.top_k), 1 / shape.top_k, dtype=hidden.dtype, device=device
    )

    def layer(_: int) -> torch.Tensor:
        assigned = assign(selected, device)
        out = torch.zeros_like(hidden)
        for expert in sorted(assigned):
            tokens = assigned[expert]
            y = expert_forward(
                module, views[expert % len(views)], gather(hidden, tokens), project=project
            )
            accumulate(out, weigh(y, weights, tokens), tokens)
        return out

    return Spread.of(_seconds(opened, layer, effort))


def _few(
    opened: MoeModel,
    store: DiskStore | ReplicaStore | None = None,
    device: torch.device | None = None,
) -> list[Mapping[str, object]]:
    """Return experts that take turns, as `expert_forward` takes them: as in a run, more than a
    cache holds."""
    store = store or opened.store
    device = device or opened.model.device
    shape = opened.shape
    views = []
    nbytes = store.layout.nbytes
    for key in range(num_few(nbytes, shape.num_keys)):
        store.read(*divmod(key, shape.num_experts), buffer := aligned(nbytes))
        views.append(store.layout.views(buffer.to(device)))
    return views


def _hidden(opened: MoeModel, num_tokens: int, device: torch.device | None = None) -> torch.Tensor:
    """Return random hidden states [num_tokens, H], always the same."""
    values = torch.randn(
        num_tokens, opened.layers[0].hidden_size, generator=torch.Generator().manual_seed(0)
    )
    return values.to(dtype=opened.dtype, device=device or opened.model.device)


def _seconds(opened: MoeModel, work: Callable[[int], object], effort: TimingEffort) -> list[float]:
    return seconds_of(work, opened.model.device, warm_up=effort.warm_up, turns=effort.turns)


# Near memory


def _near(
    opened: MoeModel, bits: int, replicas: Replicas | None, effort: TimingEffort
) -> Iterator[NearCompute]:
    """Measure one expert of one width on the CPU, in RAM; a few experts take turns."""
    store = opened.store if bits == FULL_BITS else open_replicas(opened, replicas, [bits])[bits]
    module = opened.layers[0].experts
    views = _few(opened, store, _CPU)
    has_trellis = store.layout.codes == "trellis"
    packed = {bits} - {FULL_BITS} if not has_trellis else ()
    make_ready(packed, has_trellis=has_trellis, dtype=opened.dtype, device=_CPU)
    for num_tokens in _NEAR_TOKENS:
        x = _hidden(opened, num_tokens, _CPU)

        def compute(turn: int, x: torch.Tensor = x) -> torch.Tensor:
            return expert_forward(module, views[turn % len(views)], x, project=store.layout.project)

        seconds = seconds_of(compute, _CPU, warm_up=effort.warm_up, turns=effort.turns)
        yield NearCompute(bits, num_tokens, Spread.of(seconds))


def _conditions(
    opened: MoeModel, machine: LocalMachine, of_run: str, effort: TimingEffort
) -> dict[str, object]:
    """Return the conditions of the profile; `machine` was observed before the measurements."""
    facts = asdict(machine)
    return {
        "device": kind_of(opened.model.device),
        "device_name": facts.pop("gpu") or machine.processor,
        **facts,
        "link": of_run,
        "dtype": str(opened.store.layout.dtype).removeprefix("torch."),
        "expert_bytes": opened.store.layout.nbytes,
        "expert_format": opened.expert_format,
        "context": _context(opened, effort),
        "turns": effort.turns,
    }
