"""Measures a machine with a model: parts of a pass by number of tokens, loads by link, experts near their memory.

Everything is measured by what runs it: the model's own layers, the engine, the links, the near tier's arithmetic.
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
from profilers.hardware.policy_overhead import deciding, places_a_layer
from profilers.hardware.this_machine import LocalMachine
from runtime.engine.engine import NAME
from runtime.kernels.low_bit import make_ready
from runtime.model.arithmetic import accumulate, assign, expert_forward, gather, weigh
from runtime.model.expert_store import DiskStore
from runtime.model.layout import aligned
from runtime.model.open import MoeModel
from runtime.session.link_choice import link_name
from runtime.session.probe import seconds_of, without_experts
from runtime.session.session import Session, Settings
from runtime.session.settings import EXACT
from runtime.tiers.replicas import ReplicaStore, open_replicas

_CONTEXT = 64  # tokens that a decoded token looks back on, at least
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
    """All of it. `folder`: where the checkpoint lies; `link` as for a run, a rate is emulated; `replicas`: widths to
    compute near. Raises BadUsage for a link that is not understood."""
    of_run = link_name(opened, link)
    before = LocalMachine.look(opened.model.device)
    limit = getattr(opened.config, "max_position_embeddings", None) or max(effort.lengths)
    lengths = [1, *sorted({length for length in effort.lengths if 1 < length <= limit})]
    widths = [FULL_BITS, *(replicas.widths if replicas else ())]
    total, done = len(lengths) + 1 + len(widths), 0
    compute, near = [], []
    of_decode, beside = decode_experts(opened, link, effort)
    for length in lengths:
        moe = of_decode if length == 1 else _prompt_experts(opened, length, effort)
        compute.append(_compute(opened, length, moe, effort))
        progress(done := done + 1, total)
    brought = (
        replace(load, **beside) if load.link == of_run else load for load in loads(opened, folder, of_run, effort)
    )
    measured = tuple(brought)
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


def layer_seconds(opened: MoeModel, num_tokens: int, effort: TimingEffort, *, after: str = "eager") -> Spread:
    """A layer without its experts: the model's body by its layers. A single token follows on others. `after` says how
    experts are implemented then."""
    body, device = opened.model.base_model, opened.model.device
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    with without_experts(opened, after=after), torch.inference_mode():
        context: dict[str, object] = {}
        if num_tokens == 1:
            past = body(input_ids=ids.expand(1, _context(opened, effort)), use_cache=True).past_key_values
            context = {"past_key_values": past, "use_cache": True}
        seconds = _seconds(opened, lambda _: body(input_ids=ids, **context), effort)
    return Spread.of([one / opened.shape.num_layers for one in seconds])


def _context(opened: MoeModel, effort: TimingEffort) -> int:
    """So many that those which are measured still have a position."""
    limit = getattr(opened.config, "max_position_embeddings", None) or 1 << 20
    return max(1, min(_CONTEXT, limit - effort.turns - effort.warm_up))


def head_seconds(opened: MoeModel, num_tokens: int, effort: TimingEffort) -> Spread:
    head = opened.model.get_output_embeddings()
    hidden = _hidden(opened, num_tokens)[None].to(head.weight.dtype)
    return Spread.of(_seconds(opened, lambda _: head(hidden), effort))


def expert_spread(opened: MoeModel, num_tokens: int, effort: TimingEffort) -> Spread:
    module, views, x = opened.layers[0].experts, _few(opened), _hidden(opened, num_tokens)
    project = opened.store.layout.project

    def compute(turn: int) -> torch.Tensor:
        return expert_forward(module, views[turn % len(views)], x, project=project)

    return Spread.of(_seconds(opened, compute, effort))


def decode_experts(
    opened: MoeModel, link: str, effort: TimingEffort, *, experts: str = EXACT
) -> tuple[Spread, dict[str, Spread]]:
    """Seconds of a layer's experts in a pass of one token when all are there, and what each adds that is not, as
    `miss` and, without the waiting for the link, as `host`; nothing where all are always there.

    Two tokens come one after the other into a fast tier that holds both tokens' experts and no more, which brings
    some; then both come again, and all are there, though no longer in the caches of the processor. Where experts are
    few, it is one. Last comes one without experts, so that all see the same machine.
    """
    shape, random = opened.shape, np.random.default_rng(0)
    there, added, worked = [], [], []
    places = places_a_layer(opened)
    settings = Settings(budget=f"{shape.num_layers * places}x", link=link, experts=experts)
    with Session(opened, settings) as session, torch.inference_mode():
        session.watcher.on_step = _nothing  # which keeps the controller deciding, as it must below the whole model
        for turn in range(effort.warm_up + effort.turns):
            drawn = random.integers(0, opened.config.vocab_size, (places // shape.top_k, 1, 1))
            tokens = [token.to(opened.model.device) for token in torch.from_numpy(drawn)]
            brought_s = sum(pass_seconds(session, token) for token in tokens)
            stall_s = sum(session.engine.stall_s[-len(tokens) :])
            there_s = sum(pass_seconds(session, token) for token in tokens)
            by_layer = session.controller.counters.by_layer(first_pass=-2 * len(tokens))
            num_misses = sum(layer["misses"] for layer in by_layer)
            with without_experts(opened, after=NAME):
                bare_s = min(pass_seconds(session, tokens[0]) for _ in range(2))  # the first finds colder caches
            if turn >= effort.warm_up:
                there.append((there_s / len(tokens) - bare_s) / shape.num_layers)
                added += [(brought_s - there_s) / num_misses] if num_misses else []
                worked += [(brought_s - stall_s - there_s) / num_misses] if num_misses else []
    return Spread.of(there), {"miss": Spread.of(added), "host": Spread.of(worked)} if len(added) > 1 else {}


def pass_seconds(session: Session, token: torch.Tensor) -> float:
    return seconds_of(lambda _: session.forward(token), token.device, warm_up=0, turns=1)[0]


def _nothing(step: object) -> None:
    pass


def _prompt_experts(opened: MoeModel, num_tokens: int, effort: TimingEffort) -> Spread:
    """A layer's experts on tokens that choose alike among all, as those of a prompt nearly do; weights of a few take
    turns in the place of all."""
    shape, device, module = opened.shape, opened.model.device, opened.layers[0].experts
    views, hidden = _few(opened), _hidden(opened, num_tokens)
    scores = np.random.default_rng(0).random((num_tokens, shape.num_experts))
    selected = np.argsort(scores, axis=1)[:, : shape.top_k]
    weights = torch.full((num_tokens, shape.top_k), 1 / shape.top_k, dtype=hidden.dtype, device=device)

    def layer(_: int) -> torch.Tensor:
        assigned = assign(selected, device)
        out = torch.zeros_like(hidden)
        for expert in sorted(assigned):
            own = assigned[expert]
            y = expert_forward(module, views[expert % len(views)], gather(hidden, own))
            accumulate(out, weigh(y, weights, own), own)
        return out

    return Spread.of(_seconds(opened, layer, effort))


def _few(
    opened: MoeModel, store: DiskStore | ReplicaStore | None = None, device: torch.device | None = None
) -> list[Mapping[str, object]]:
    """Experts that take turns, as `expert_forward` takes them: more than a cache would hold, as in a run."""
    store, device, shape = store or opened.store, device or opened.model.device, opened.shape
    found, nbytes = [], store.layout.nbytes
    for key in range(num_few(nbytes, shape.num_keys)):
        store.read(*divmod(key, shape.num_experts), buffer := aligned(nbytes))
        found.append(store.layout.views(buffer.to(device)))
    return found


def _hidden(opened: MoeModel, num_tokens: int, device: torch.device | None = None) -> torch.Tensor:
    """[num_tokens, H] at random, always the same."""
    values = torch.randn(num_tokens, opened.config.hidden_size, generator=torch.Generator().manual_seed(0))
    return values.to(dtype=opened.dtype, device=device or opened.model.device)


def _seconds(opened: MoeModel, work: Callable[[int], object], effort: TimingEffort) -> list[float]:
    return seconds_of(work, opened.model.device, warm_up=effort.warm_up, turns=effort.turns)


# Near memory


def _near(opened: MoeModel, bits: int, replicas: Replicas | None, effort: TimingEffort) -> Iterator[NearCompute]:
    """One expert on the CPU, in RAM, at one width; a few take turns."""
    store = opened.store if bits == FULL_BITS else open_replicas(opened, replicas, [bits])[bits]
    module, views = opened.layers[0].experts, _few(opened, store, _CPU)
    make_ready({bits} - {FULL_BITS}, _CPU)
    for num_tokens in _NEAR_TOKENS:
        x = _hidden(opened, num_tokens, _CPU)

        def compute(turn: int, x: torch.Tensor = x) -> torch.Tensor:
            return expert_forward(module, views[turn % len(views)], x, project=store.layout.project)

        seconds = seconds_of(compute, _CPU, warm_up=effort.warm_up, turns=effort.turns)
        yield NearCompute(bits, num_tokens, Spread.of(seconds))


def _conditions(opened: MoeModel, here: LocalMachine, of_run: str, effort: TimingEffort) -> dict[str, object]:
    """`load` is as it was before anything was measured."""
    facts = asdict(here)
    return {
        "device": opened.model.device.type,
        "device_name": facts.pop("gpu") or here.processor,
        **facts,
        "link": of_run,
        "dtype": str(opened.store.layout.dtype).removeprefix("torch."),
        "expert_bytes": opened.store.layout.nbytes,
        "context": _context(opened, effort),
        "turns": effort.turns,
    }
