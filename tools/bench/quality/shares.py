"""Loss of a model when all its experts are at a share of 16 bits, or of the fewer bits of its
checkpoint.

    moectl quantize --store gptq.duckdb
    moectl quantize --recipe trellis --store trellis.duckdb
    python -m tools.bench.quality.shares --store gptq.duckdb --store trellis.duckdb [--write docs/quantisation.md]

Replicas are chosen by the greedy over all experts, by gated loss times how much an error in their
layer counts: by the ramp of `passed_on`, or as `sensitivity` measures it on calibration text. In a
checkpoint in few bits, layers are weighed by the ramp, and the greedy may also leave experts out,
or keep them whole. All bytes that stay count. Text is read in one pass, in float32, by
transformers' own modules on dequantised weights.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from artifacts.quantisation.bit_allocation import greedy_columns
from artifacts.quantisation.packing import Packed
from artifacts.quantisation.replica_file import read_replica
from artifacts.quantisation.replicas import Replicas, passed_on, resident_nbytes
from artifacts.quantisation.widths import NOTHING, Width, columns_of
from artifacts.shape import FULL_BITS
from artifacts.store.store import Store
from moectl.bundled import demo_model
from moectl.shared.opening import open_quietly
from moectl.shared.text import read_data
from profilers.quantise.lockstep import batches
from profilers.text.batches import padded
from runtime.kernels.low_bit import dequantise
from runtime.model.open import MoeModel, open_model
from runtime.session.artefacts import load_artefacts
from tools.arguments import parser_of
from tools.bench.performance import Section, Table, conditions, write

SHARES = (0.175, 0.15, 0.125, 0.1, 0.085, 0.07)
OF_FEW_BITS = (0.25, 0.375)
BOTH_WAYS = (0.125, 0.1, 0.07)
MIXTURES = {
    "mixed": ((), ()),
    "mixed, or whole": ((), (FULL_BITS,)),
    "pruned": ((NOTHING,), ()),
    "pruned, or whole": ((NOTHING,), (FULL_BITS,)),
}
"""What the greedy gives out below the narrowest replica and above the widest."""
PAST = (
    "layers weighed by the ramp from 2 to 1, or as one pass backward over calibration text "
    "measures them"
)
LENGTH = 256
BATCH_TOKENS = 4096
GUIDING_TOKENS = 12288


@dataclass(frozen=True, slots=True)
class Loss:
    """Against the full model on the same tokens; `error` is the standard error of the ratio, over
    sequences."""

    nbytes: int
    ratio: float
    error: float
    kl: float


class Reader:
    """The plain model on sequences of text, whole and with other experts."""

    def __init__(self, name: str, sequences: Sequence[np.ndarray]) -> None:
        self.opened = open_model(name, dtype=torch.float32)
        self.model = self.opened.model
        self.model.set_experts_implementation("grouped_mm")
        self._parts = batches(sequences, num_tokens=BATCH_TOKENS)
        self._modules = [layer.experts for layer in self.opened.layers]
        for module in self._modules:
            for part, parameter in module.named_parameters():
                setattr(module, part, torch.nn.Parameter(torch.empty(parameter.shape)))
        for key in range(self.opened.shape.num_keys):
            self._put_whole(key)
        self._full = [log_probabilities(self.model, part) for part in self._parts]

    def loss(self, replicas: Replicas, bits: np.ndarray) -> Loss:
        """Put replicas of `bits` [L * E] in the place of experts, and read."""
        self._put(replicas, bits)
        differences = []
        kl = 0.0
        count = 0
        for part, full in zip(self._parts, self._full, strict=True):
            for theirs, mine, targets in zip(
                full, log_probabilities(self.model, part), part, strict=True
            ):
                wanted = torch.from_numpy(targets[1:])[:, None]
                differences.append((float((theirs - mine).gather(1, wanted).sum()), len(wanted)))
                kl += float((theirs.exp() * (theirs - mine)).sum())
                count += len(wanted)
        ratio, error = _ratio(np.array(differences))
        return Loss(resident_nbytes(replicas.nbytes, bits.tolist()), ratio, error, kl / count)

    def _put(self, replicas: Replicas, bits: np.ndarray) -> None:
        for key, width in enumerate(bits.tolist()):
            layer, expert = divmod(key, self.opened.shape.num_experts)
            module = self._modules[layer]
            if width == FULL_BITS:
                self._put_whole(key)
            elif width == NOTHING:
                for parameter in module.parameters():
                    parameter.data[expert] = 0
            else:
                self._put_replica(module, expert, replicas.files[key], width)

    @staticmethod
    def _put_replica(module: torch.nn.Module, expert: int, path: Path, width: Width) -> None:
        for name, part in read_replica(path, width).items():
            if not isinstance(part, torch.Tensor):
                weight = dequantise(part) if isinstance(part, Packed) else part.dequantised()
                getattr(module, name).data[expert] = weight.T if module.is_transposed else weight

    def _put_whole(self, key: int) -> None:
        layer, expert = divmod(key, self.opened.shape.num_experts)
        layout = self.opened.store.layout
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
        self.opened.store.read(layer, expert, buffer)
        for name, numbers in layout.weights(buffer).items():
            getattr(self._modules[layer], name).data[expert] = numbers

    def sensitivity(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """Return the cost of a squared error in the output of each layer's experts, [L, 1, 1], with
        a mean of 1.

        It takes one pass backward over text with tokens that the model itself draws (Fisher's
        information).
        """
        squares = np.zeros(len(self._modules))
        counts = 0
        generator = torch.Generator().manual_seed(0)
        for part in batches(sequences, num_tokens=BATCH_TOKENS):
            heard: list[torch.Tensor] = []
            hooks = [module.register_forward_hook(_listener(heard)) for module in self._modules]
            ids, mask = padded(part)
            logits = self.model(input_ids=ids, attention_mask=mask).logits
            for hook in hooks:
                hook.remove()
            drawn = torch.multinomial(
                logits.detach().softmax(-1).flatten(0, 1), 1, generator=generator
            )
            nll = -logits.log_softmax(-1).flatten(0, 1).gather(1, drawn)[:, 0]
            real = torch.ones(ids.shape) if mask is None else mask
            (nll * real.flatten()).sum().backward()
            squares += [float(output.grad.square().sum()) for output in heard]
            counts += int(real.sum())
            self.model.zero_grad()
        return (squares / squares.mean())[:, None, None]


def _listener(heard: list[torch.Tensor]):
    def listen(module: torch.nn.Module, _: object, output: torch.Tensor) -> None:
        output.retain_grad()
        heard.append(output)

    return listen


def _ratio(differences: np.ndarray) -> tuple[float, float]:
    """The perplexity ratio and its standard error from sums of differences and tokens by sequence
    [n, 2]."""
    total, count = differences.sum(0)
    mean = total / count
    spread = differences[:, 0] - mean * differences[:, 1]
    ratio = math.exp(mean)
    return ratio, ratio * math.sqrt(float((spread**2).sum())) / count


@torch.inference_mode()
def log_probabilities(model: PreTrainedModel, part: tuple[np.ndarray, ...]) -> list[torch.Tensor]:
    """Return log probabilities [T - 1, V] of each sequence of T tokens."""
    ids, mask = padded(part)
    logits = model(input_ids=ids, attention_mask=mask).logits
    return [row[: len(own) - 1].log_softmax(-1) for row, own in zip(logits, part, strict=True)]


def chosen(
    replicas: Replicas,
    weight: np.ndarray,
    budget_nbytes: int,
    *,
    below: tuple[Width, ...] = (),
    above: tuple[Width, ...] = (),
) -> np.ndarray:
    """Bits [L * E] by the greedy, from losses that are weighted by `weight` in place of the ramp,
    of all widths and of those `below` and `above` them."""
    lost = replicas.lost / passed_on(len(replicas.use)) * weight
    lost = lost.reshape(-1, lost.shape[-1])[:, columns_of([*below, *replicas.widths])]
    costs = np.pad(lost, ((0, 0), (0, len(above))))
    widths = [*below, *replicas.widths, *above]
    nbytes = replicas.nbytes | dict.fromkeys(below, 0)
    zeros = replicas.nbytes[replicas.widths[0]] if below else 0
    columns = greedy_columns(costs, [nbytes[width] for width in widths], budget_nbytes - zeros)
    return np.array(widths, object)[columns]


def measure(name: str, stores: Sequence[Path], held: str, data: str, tokens: int) -> Table:
    """A row for each store and share, and for each mixture or way to weigh layers, both ways where
    `BOTH_WAYS` says."""
    opened = open_quietly(name, device="cpu")
    text = read_data(opened, held, length=LENGTH, num_tokens=tokens, seed=0).sequences
    reader = Reader(name, text)
    rows = []
    is_plain = opened.store.layout.is_plain
    if is_plain:
        guiding = read_data(
            opened, data, length=LENGTH, num_tokens=GUIDING_TOKENS, seed=0
        ).sequences
        weights = {
            "ramp": passed_on(opened.shape.num_layers),
            "measured": reader.sensitivity(guiding),
        }
    for path in stores:
        recipe, replicas = _stored(path, opened, name)
        whole = opened.shape.nbytes
        for share in SHARES if is_plain else OF_FEW_BITS:
            if min(replicas.nbytes.values()) * opened.shape.num_keys > share * whole:
                continue
            budget = int(share * whole)
            if is_plain:
                taken = weights if share in BOTH_WAYS else {"ramp": weights["ramp"]}
                ways = {way: chosen(replicas, weight, budget) for way, weight in taken.items()}
            else:
                ways = {way: _mixture(replicas, budget, way) for way in MIXTURES}
            for way, bits in ways.items():
                rows.append(
                    (f"{share:.1%}", recipe, way, *_cells(reader.loss(replicas, bits), whole))
                )
                if not is_plain:
                    rows[-1] += ((bits == NOTHING).sum(), (bits == FULL_BITS).sum())
                print(name, *rows[-1], flush=True)
    note = (
        f"{sum(map(len, text)):,} held-out tokens of {Path(held).name}, sequences of at most "
        f"{LENGTH}"
    )
    measured = ("bytes", "perplexity ratio", "standard error", "KL")
    if is_plain:
        columns = ("share of 16 bits", "recipe", "layers weighed", *measured)
        return Table("What a share of 16 bits loses", columns, rows, f"{note}; {PAST}")
    columns = ("share of the checkpoint", "recipe", "chosen", *measured, "left out", "whole")
    note = f"{note}; experts in {opened.expert_format} a weight, {opened.shape.num_keys} of them"
    return Table("What a share of a checkpoint in few bits loses", columns, rows, note)


def _stored(path: Path, opened: MoeModel, name: str) -> tuple[str, Replicas]:
    """The recipe and replicas of a store."""
    with Store.open(path, read_only=True) as store:
        model = store.require_model(opened.fingerprint, name=name)
        recipe = store.latest_run("quantize", model.model_id).info.parameters["recipe"]
        return recipe, load_artefacts(store, model.model_id, opened.shape, wants=()).replicas


def _mixture(replicas: Replicas, budget_nbytes: int, named: str) -> np.ndarray:
    below, above = MIXTURES[named]
    return chosen(replicas, passed_on(len(replicas.use)), budget_nbytes, below=below, above=above)


def _cells(loss: Loss, whole_nbytes: int) -> tuple[str, ...]:
    return (
        f"{loss.nbytes / whole_nbytes:.2%}",
        f"{loss.ratio:.4f}",
        f"{loss.error:.4f}",
        f"{loss.kl:.4f}",
    )


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    table = measure(
        options.model or str(demo_model()),
        options.store,
        options.held_out,
        options.data,
        options.tokens,
    )
    if options.write:
        given = ["python -m tools.bench.quality.shares"]
        if options.model:
            texts = zip(("held-out", "data"), (options.held_out, options.data), strict=True)
            given += ["--model MODEL", *(f"--{option} {Path(text).name}" for option, text in texts)]
        command = " ".join([*given, *(f"--store {path.name}" for path in options.store)])
        write(options.write, [Section(f"shares-{options.name}", [table])], conditions(command))


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        model=(str, "folder of the model; else the bundled one"),
        name=("bundled", "of the section in the page"),
        held_out="builtin:held-out",
        data=("builtin", "text on which layers are weighed"),
        tokens=24576,
        threads=1,
        write=Path,
    )
    parser.add_argument(
        "--store",
        type=Path,
        action="append",
        required=True,
        help="with replicas, once for each recipe",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
