"""What a model loses when all its experts are at a share of 16 bits, by recipe of the replicas.

    moectl quantize --store gptq.duckdb
    moectl quantize --recipe trellis --store trellis.duckdb
    python -m tools.bench.shares --store gptq.duckdb --store trellis.duckdb [--write docs/quantisation.md]

Replicas are chosen by the greedy over all experts, by gated loss times how much an error in their layer counts: by the
ramp of `passed_on`, or as `sensitivity` measures it on calibration text. All bytes of replicas count. Text is read in
one pass, in float32, by transformers' own modules on dequantised weights.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from artifacts.quantisation.bit_allocation import greedy_columns
from artifacts.quantisation.packing import Packed
from artifacts.quantisation.replica_file import read_replica
from artifacts.quantisation.replicas import Replicas, passed_on
from artifacts.quantisation.widths import columns_of
from artifacts.store.store import Store
from moectl.bundled import demo_model
from moectl.shared.opening import open_quietly
from moectl.shared.text import read_data
from profilers.quantise.lockstep import batches
from profilers.text.batches import padded
from runtime.kernels.low_bit import dequantise
from runtime.model.open import MoeModel
from runtime.session.artefacts import load_artefacts
from tools.bench.performance import Section, Table, conditions, write

SHARES, BOTH_WAYS = (0.175, 0.15, 0.125, 0.1, 0.085, 0.07), (0.125, 0.1, 0.07)
PAST = "layers weighed by the ramp from 2 to 1, or as one pass backward over calibration text measures them"
LENGTH, BATCH_TOKENS, GUIDING_TOKENS = 256, 4096, 12288


@dataclass(frozen=True, slots=True)
class Loss:
    """Against the full model on the same tokens; `error` is the standard error of the ratio, over sequences."""

    nbytes: int
    ratio: float
    error: float
    kl: float


class Reader:
    """The plain model on sequences of text, whole and with other experts."""

    def __init__(self, name: str, opened: MoeModel, sequences: Sequence[np.ndarray]) -> None:
        self.opened = opened
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        self._parts = batches(sequences, num_tokens=BATCH_TOKENS)
        self._modules = [self.model.get_submodule(layer.name) for layer in opened.layers]
        self._full = [log_probabilities(self.model, part) for part in self._parts]

    def loss(self, replicas: Replicas, bits: np.ndarray) -> Loss:
        """Put replicas of `bits` [L * E] in the place of all experts, and read."""
        self._put(replicas, bits)
        differences, kl, count = [], 0.0, 0
        for part, full in zip(self._parts, self._full, strict=True):
            for theirs, mine, targets in zip(full, log_probabilities(self.model, part), part, strict=True):
                wanted = torch.from_numpy(targets[1:])[:, None]
                differences.append((float((theirs - mine).gather(1, wanted).sum()), len(wanted)))
                kl += float((theirs.exp() * (theirs - mine)).sum())
                count += len(wanted)
        ratio, error = _ratio(np.array(differences))
        nbytes = sum(replicas.nbytes[width] for width in bits.tolist())
        return Loss(nbytes, ratio, error, kl / count)

    def _put(self, replicas: Replicas, bits: np.ndarray) -> None:
        num_experts = self.opened.shape.num_experts
        for key, width in enumerate(bits.tolist()):
            layer, expert = divmod(key, num_experts)
            module = self._modules[layer]
            for name, part in read_replica(replicas.files[key], width).items():
                if not isinstance(part, torch.Tensor):
                    weight = dequantise(part) if isinstance(part, Packed) else part.dequantised()
                    getattr(module, name).data[expert] = weight.T if module.is_transposed else weight

    def sensitivity(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """[L, 1, 1]: how much a squared error in the output of each layer's experts costs, by one pass backward over
        text with tokens that the model itself draws (Fisher's information), with a mean of 1."""
        squares, counts = np.zeros(len(self._modules)), 0
        generator = torch.Generator().manual_seed(0)
        for part in batches(sequences, num_tokens=BATCH_TOKENS):
            heard: list[torch.Tensor] = []
            hooks = [module.register_forward_hook(_listener(heard)) for module in self._modules]
            ids, mask = padded(part)
            logits = self.model(input_ids=ids, attention_mask=mask).logits
            for hook in hooks:
                hook.remove()
            drawn = torch.multinomial(logits.detach().softmax(-1).flatten(0, 1), 1, generator=generator)
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
    """The perplexity ratio and its standard error from sums of differences and tokens by sequence [n, 2]."""
    total, count = differences.sum(0)
    mean = total / count
    spread = differences[:, 0] - mean * differences[:, 1]
    ratio = math.exp(mean)
    return ratio, ratio * math.sqrt(float((spread**2).sum())) / count


@torch.inference_mode()
def log_probabilities(model: PreTrainedModel, part: tuple[np.ndarray, ...]) -> list[torch.Tensor]:
    """[T - 1, V] of each sequence of T tokens."""
    ids, mask = padded(part)
    logits = model(input_ids=ids, attention_mask=mask).logits
    return [row[: len(own) - 1].log_softmax(-1) for row, own in zip(logits, part, strict=True)]


def chosen(replicas: Replicas, weight: np.ndarray, budget_nbytes: int) -> np.ndarray:
    """Bits [L * E] by the greedy, from losses that are weighted by `weight` in place of the ramp."""
    lost = replicas.lost / passed_on(len(replicas.use)) * weight
    widths = replicas.widths
    costs = lost.reshape(-1, lost.shape[-1])[:, columns_of(widths)]
    columns = greedy_columns(costs, [replicas.nbytes[width] for width in widths], budget_nbytes)
    return np.array(widths, object)[columns]


def measure(name: str, stores: Sequence[Path], held: str, data: str, tokens: int) -> Table:
    """A row for each store, share and way to weigh layers, where `BOTH_WAYS` has the share."""
    opened = open_quietly(name, device="cpu")
    text = [
        read_data(opened, each, length=LENGTH, num_tokens=count, seed=0).sequences
        for each, count in ((held, tokens), (data, GUIDING_TOKENS))
    ]
    reader = Reader(name, opened, text[0])
    weights = {"ramp": passed_on(opened.shape.num_layers), "measured": reader.sensitivity(text[1])}
    rows = []
    for path in stores:
        with Store.open(path, read_only=True) as store:
            model = store.require_model(opened.fingerprint, former=opened.former_fingerprint, name=name)
            recipe = store.latest_run("quantize", model.model_id).info.parameters["recipe"]
            replicas = load_artefacts(store, model.model_id, opened.shape, wants=()).replicas
        whole = opened.shape.nbytes
        for share in SHARES:
            for way, weight in weights.items():
                if min(replicas.nbytes.values()) * opened.shape.num_keys > share * whole:
                    continue
                if way == "measured" and share not in BOTH_WAYS:
                    continue
                loss = reader.loss(replicas, chosen(replicas, weight, int(share * whole)))
                rows.append(
                    (
                        f"{share:.1%}",
                        recipe,
                        way,
                        f"{loss.nbytes / whole:.2%}",
                        f"{loss.ratio:.4f}",
                        f"{loss.error:.4f}",
                        f"{loss.kl:.4f}",
                    )
                )
                print(name, *rows[-1], flush=True)
    columns = ("share of 16 bits", "recipe", "layers weighed", "bytes", "perplexity ratio", "standard error", "KL")
    note = f"{sum(map(len, text[0])):,} held-out tokens of {Path(held).name}, sequences of at most {LENGTH}; {PAST}"
    return Table("What a share of 16 bits loses", columns, rows, note)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    table = measure(options.model or str(demo_model()), options.store, options.held_out, options.data, options.tokens)
    if options.write:
        given = ["python -m tools.bench.shares"]
        if options.model:
            texts = zip(("held-out", "data"), (options.held_out, options.data), strict=True)
            given += ["--model MODEL", *(f"--{option} {Path(text).name}" for option, text in texts)]
        command = " ".join([*given, *(f"--store {path.name}" for path in options.store)])
        write(options.write, [Section(f"shares-{options.name}", [table])], conditions(command))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the model; else the bundled one")
    parser.add_argument("--name", default="bundled", help="of the section in the page")
    parser.add_argument(
        "--store", type=Path, action="append", required=True, help="with replicas, once for each recipe"
    )
    parser.add_argument("--held-out", default="builtin:held-out")
    parser.add_argument("--data", default="builtin", help="text on which layers are weighed")
    parser.add_argument("--tokens", type=int, default=24576)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
