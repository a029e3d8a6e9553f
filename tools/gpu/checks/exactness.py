"""Checks of what sessions compute: logits and greedy tokens beside the plain model's on the same
device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Thread

import torch

from tools.gpu.checks.sessions import RUNS, Finding

NUM_DECODED = 6
NUM_GREEDY = 12
# relative in float32: the same kernels, those of the host, or our own
FETCHED = 1e-5
COMPUTED_ELSEWHERE = 1e-4
COARSE = 5e-2  # relative in bfloat16, where another rounding may change a router's selection
NO_WORSE = 1.5  # times plain bfloat16's own distance from float32, for kernels that round elsewhere


@dataclass(frozen=True, slots=True)
class Said:
    """Outputs of a model: logits of a prompt, of a batch and of decoded tokens, and its greedy
    tokens."""

    logits: tuple[torch.Tensor, ...]
    tokens: list[int]


@torch.inference_mode()
def listen(model: torch.nn.Module, vocabulary: int) -> Said:
    """Compute the outputs of a model, plain or offloaded."""
    device = model.device
    ids = _prompts(vocabulary).to(device)
    prompt = model(input_ids=ids[:1], use_cache=True)
    logits = [prompt.logits, model(input_ids=ids).logits]
    past = prompt.past_key_values
    for position in range(NUM_DECODED):
        step = model(
            input_ids=ids[1:2, position : position + 1], past_key_values=past, use_cache=True
        )
        logits.append(step.logits)
    return Said(tuple(each.float().cpu() for each in logits), _greedy(model, ids[:1]))


def _prompts(vocabulary: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (3, 24), generator=torch.Generator().manual_seed(1))


def _greedy(model: torch.nn.Module, ids: torch.Tensor) -> list[int]:
    own = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    chosen = model.generate(ids, max_new_tokens=NUM_GREEDY, min_new_tokens=NUM_GREEDY, **own)
    return chosen[0, ids.shape[1] :].tolist()


def plain(folder: Path, dtype: torch.dtype, device: str) -> Said:
    """Outputs of transformers' eager implementation."""
    from tools.bench.decoding.resident import plain_model

    model = plain_model(folder, dtype=dtype, device=device)
    return listen(model, model.config.vocab_size)


def exactness(
    checkpoint: Callable[[], Path], dtype: torch.dtype, device: str
) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """A check for each run: logits and greedy tokens of the offloaded and of the plain model on the
    same device."""
    theirs = cache(lambda: plain(checkpoint(), dtype, device))
    exact = cache(lambda: plain(checkpoint(), torch.float32, device))

    def check(name: str) -> Finding:
        ours = offloaded(checkpoint(), dtype, device, RUNS[name])
        if "near" not in name and "experts" not in RUNS[name]:
            return compare(ours, theirs(), dtype)
        if dtype is torch.float32:
            return compare(ours, theirs(), dtype, allowed=COMPUTED_ELSEWHERE)
        return compare_rounded(ours, theirs(), exact())

    for name in runs_on(device):
        yield name, lambda name=name: check(name)
        if dtype is torch.float32 and device != "cpu" and RUNS[name].get("experts") == "fused":
            yield (
                f"{name}, as graphs",
                lambda name=name: as_graphs(checkpoint(), dtype, device, RUNS[name]),
            )


def runs_on(device: str) -> list[str]:
    """The names of RUNS that this device can do."""
    from tools.gpu.packages import experts_by  # which imports moectl

    own = {"experts": experts_by(device), "decide": "host" if device == "cpu" else "device"}
    return [
        name for name, run in RUNS.items() if all(run.get(key, own[key]) == own[key] for key in own)
    ]


def offloaded(folder: Path, dtype: torch.dtype, device: str, run: dict) -> Said:
    return _offloaded(folder, dtype, device, run)[0]


def _offloaded(
    folder: Path, dtype: torch.dtype, device: str, run: dict, *, singly: bool = False
) -> tuple[Said, dict[str, object]]:
    """Return the outputs of a session, and its facts on CUDA graphs; `singly` runs without
    graphs."""
    from runtime.model.open import open_model
    from runtime.session.session import Session, Settings

    opened = open_model(str(folder), dtype=dtype, device=device)
    budget = run.get("budget", "25%").format(layers=opened.shape.num_layers)
    with Session(opened, Settings(**run | {"budget": budget})) as session:
        if singly:
            session.engine.captured.stop()
        said = listen(opened.model, opened.config.vocab_size)
        session.validate()
        captured = session.receipt()["captured"]
    opened.store.close()
    return said, captured


def as_graphs(folder: Path, dtype: torch.dtype, device: str, run: dict) -> Finding:
    """Passed if tokens are replayed as CUDA graphs, with the outputs of the same tokens launched
    one by one."""
    (ours, told), (theirs, _) = (
        _offloaded(folder, dtype, device, run, singly=singly) for singly in (False, True)
    )
    is_near, detail, figures = compare(ours, theirs, dtype, allowed=COMPUTED_ELSEWHERE)
    why_not = f"; {told['why_not']}" if told["why_not"] else ""
    graphs = (
        f"{told['tokens']} tokens of {told['graphs']} graphs, captured {told['captures']} "
        f"times{why_not}"
    )
    return is_near and bool(told["tokens"]), f"{graphs}; {detail}", figures | told


def forwards_then_generates(folder: Path, dtype: torch.dtype, device: str) -> Finding:
    """Passed if `generate` on a thread without inference mode gives the plain model's tokens after
    a session's own forward, whose allocations are used again."""
    from runtime.model.open import open_model
    from runtime.session.session import Session, Settings

    theirs = plain(folder, dtype, device)
    opened = open_model(str(folder), dtype=dtype, device=device)
    said = []
    ids = _prompts(opened.config.vocab_size)[:1].to(device)
    with Session(opened, Settings(**RUNS["25%, prefetched"])) as session:
        session.forward(ids)
        thread = Thread(target=lambda: said.append(_greedy(opened.model, ids)))
        thread.start()
        thread.join()
    opened.store.close()
    return (
        said == [theirs.tokens],
        f"greedy tokens {'equal' if said == [theirs.tokens] else 'DIFFER or none'}",
        {},
    )


def compare(
    ours: Said, theirs: Said, dtype: torch.dtype, *, allowed: float | None = None
) -> Finding:
    """Passed if the difference of logits is `allowed`, by default what is for torch's own kernels,
    and tokens are equal."""
    allowed = allowed or (FETCHED if dtype is torch.float32 else COARSE)
    is_equal = all(torch.equal(*pair) for pair in zip(ours.logits, theirs.logits, strict=True))
    relative = difference(ours, theirs)
    same_tokens = ours.tokens == theirs.tokens
    told = "bit-equal" if is_equal else f"largest difference {relative:.1e} of the largest logit"
    detail = f"{told}; greedy tokens {'equal' if same_tokens else 'DIFFER'}"
    figures = {
        "bit_equal": is_equal,
        "relative": relative,
        "tokens_equal": same_tokens,
        "allowed": allowed,
    }
    return relative <= allowed and same_tokens, detail, figures


def compare_rounded(ours: Said, theirs: Said, exact: Said) -> Finding:
    """Passed if logits of kernels that round elsewhere in bfloat16 are about as near to float32's
    as the plain model's logits are.

    A rounding may change a router's selection, and then either may be the nearer one. Tokens may
    differ.
    """
    relative = difference(ours, theirs)
    own = difference(ours, exact)
    plain_own = difference(theirs, exact)
    allowed = max(COARSE, NO_WORSE * plain_own)
    detail = (
        f"{own:.1e} from float32's logits, the plain model {plain_own:.1e}; from each other "
        f"{relative:.1e}"
    )
    figures = {
        "bit_equal": not relative,
        "relative": relative,
        "from_float32": own,
        "plain_from_float32": plain_own,
    }
    return (
        own <= allowed,
        detail,
        figures | {"tokens_equal": ours.tokens == theirs.tokens, "allowed": allowed},
    )


def difference(ours: Said, theirs: Said) -> float:
    """The largest difference of logits, relative to the largest logit."""
    pairs = zip(ours.logits, theirs.logits, strict=True)
    return max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)
