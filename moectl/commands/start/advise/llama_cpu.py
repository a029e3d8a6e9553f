"""Tokens a second of llama.cpp on a CPU, from a GGUF header and a table of what a weight costs.

Calculated: a token takes the time of its weights, all of those besides experts and top_k of the
experts, plus a time for each layer and for sampling from the vocabulary. Attention over a long
context is not counted.
"""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from artifacts.errors import BadInput
from runtime.model.gguf.config import read_headers

NS_PER_WEIGHT = {
    "Q4_0": 0.147,
    "Q4_K": 0.0927,
    "Q5_K": 0.121,
    "Q6_K": 0.127,
    "Q8_0": 0.156,
    "IQ4_XS": 0.110,
    "MXFP4": 0.0994,
}
"""Nanoseconds of one thread for a weight of each type: one core of a Xeon (Sapphire Rapids, 2.1
GHz) with llama.cpp b11549 built for AVX2, fitted by `python -m tools.bench.decoding.advice fit`."""

LAYER_S = 48e-6
WORD_S = 25e-9
"""Seconds of a layer besides its weights, and of sampling for each token of the vocabulary."""

FURTHER_THREAD = 0.66
"""The part of a thread's work that each further thread adds, from one model with two threads."""

SPREAD = 0.25
"""How far off a prediction may be until there are verifications: errors in docs/lab/advise.md reach
0.24."""

_PLAIN = ("F32",)
"""Routers, counted with the layer."""
_EXPERTS = re.compile(r"blk\.\d+\.ffn_\w+_exps\.weight")


@dataclass(frozen=True, slots=True)
class CpuWork:
    """Work of a token: weights by type, layers, words of the vocabulary, and bytes it reads."""

    weights: dict[str, float]
    layers: int
    words: int
    nbytes: float

    @classmethod
    def of(cls, path: Path) -> "CpuWork":
        """Read the headers of a model's GGUF files. Raises BadInput."""
        headers = read_headers(path)
        own = headers[0].entries
        kind = own.get("general.architecture")
        try:
            share = own[f"{kind}.expert_used_count"] / own[f"{kind}.expert_count"]
            layers = own[f"{kind}.block_count"]
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise BadInput(f"{path} does not say how many experts a token uses") from error
        tensors = {name: each for header in headers for name, each in header.tensors.items()}
        work = cls({}, layers, tensors["token_embd.weight"].shape[0], 0.0)
        nbytes = 0.0
        for name, tensor in tensors.items():
            is_table = name == "token_embd.weight" and "output.weight" in tensors
            if len(tensor.shape) < 2 or is_table or tensor.type.name in _PLAIN:
                continue
            used = share if _EXPERTS.fullmatch(name) else 1.0
            type_ = tensor.type.name
            work.weights[type_] = work.weights.get(type_, 0.0) + used * prod(tensor.shape)
            nbytes += used * tensor.nbytes
        return cls(work.weights, work.layers, work.words, nbytes)


def tokens_per_second(work: CpuWork, threads: int, near_gbps: float | None = None) -> float:
    """Return tokens a second with so many threads; memory of `near_gbps` bounds them where that is
    known. Raises BadInput for a type without a measured cost."""
    if unknown := work.weights.keys() - NS_PER_WEIGHT:
        raise BadInput(
            f"no time of a weight is known for {', '.join(sorted(unknown))}, only for "
            f"{', '.join(NS_PER_WEIGHT)}"
        )
    products_s = sum(count * NS_PER_WEIGHT[name] for name, count in work.weights.items()) / 1e9
    products_s /= 1 + FURTHER_THREAD * (threads - 1)
    if near_gbps is not None:
        products_s = max(products_s, work.nbytes / near_gbps / 1e9)
    return 1 / (products_s + work.layers * LAYER_S + work.words * WORD_S)
