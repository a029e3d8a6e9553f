"""Figures of the demo model on text it never saw: perplexity by kind, and how much its routers have
learned."""

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from profilers.text.corpus import token_sequences
from tools.make.demo_text import kind_documents, present_kinds

# of a held-out sequence; of held-out text of a kind
LENGTH = 256
NUM_TOKENS = 12 * 1024


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures on one kind of text; the lists have one value a layer.

    `overlap`: mean share of a token's selected experts that the next token selects too; top_k /
    num_experts if chosen blindly. `popularity`: the same share if every token chose by the experts'
    popularity alone. `use_entropy`: entropy of how often each expert is selected, 1 when all are
    used alike.
    """

    num_tokens: int
    perplexity: float
    overlap: list[float]
    popularity: list[float]
    use_entropy: list[float]


def figures(model: torch.nn.Module, sequences: Sequence[np.ndarray]) -> Figures:
    """Return the figures of these sequences, run one by one so that no padding reaches a router."""
    losses = []
    overlaps = []
    counts = []
    for sequence in sequences:
        loss, selected = observe(model, torch.from_numpy(sequence)[None])
        losses.append(loss)
        overlaps.append(neighbour_overlap(selected))
        counts.append(
            torch.stack(
                [layer.flatten().bincount(minlength=model.config.num_experts) for layer in selected]
            )
        )
    num_pairs = np.array([len(sequence) - 1 for sequence in sequences])
    num_tokens = sum(map(len, sequences))
    counts = sum(counts)
    return Figures(
        num_tokens=num_tokens,
        perplexity=round(math.exp(np.average(losses, weights=num_pairs)), 2),
        overlap=rounded(np.average(torch.stack(overlaps), axis=0, weights=num_pairs)),
        popularity=rounded(
            (counts / num_tokens).square().sum(dim=1) / model.config.num_experts_per_tok
        ),
        use_entropy=rounded(entropy(counts)),
    )


def rounded(values: np.ndarray | torch.Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]


@torch.inference_mode()
def observe(model: torch.nn.Module, ids: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Mean loss of the next token, and the selected experts: int64 [L, T, K]."""
    output = model(input_ids=ids, output_router_logits=True, use_cache=False)
    loss = torch.nn.functional.cross_entropy(output.logits[0, :-1].float(), ids[0, 1:])
    return loss.item(), torch.stack(output.router_logits).topk(
        model.config.num_experts_per_tok
    ).indices


def neighbour_overlap(selected: torch.Tensor) -> torch.Tensor:
    """Mean share of experts common to a token and the next: [L, T, K] -> [L]."""
    common = (selected[:, :-1, :, None] == selected[:, 1:, None, :]).any(dim=-1)
    return common.double().mean(dim=(1, 2))


def entropy(counts: torch.Tensor) -> torch.Tensor:
    """Return the entropy of each row as a distribution, 1 where it is uniform: [L, E] -> [L]."""
    p = counts.double() / counts.sum(dim=1, keepdim=True)
    return torch.special.entr(p).sum(dim=1) / math.log(counts.shape[1])


def measure(folder: Path) -> dict[str, Figures]:
    """The figures of the saved checkpoint, computed in float32, on held-out text of every kind this
    machine has."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {kind: figures(model, held_out_sequences(kind, tokenizer)) for kind in present_kinds()}


def held_out_sequences(kind: str, tokenizer) -> list[np.ndarray]:
    return list(
        token_sequences(
            kind_documents(kind, held_out=True), tokenizer, length=LENGTH, num_tokens=NUM_TOKENS
        )
    )


def write_card(folder: Path, run: dict, measured: dict[str, Figures]) -> str:
    """README.md for readers and figures.json for programs; returns the card's table."""
    run = run | {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": machine(),
    }
    facts = {"run": run, "held_out": {kind: asdict(values) for kind, values in measured.items()}}
    (folder / "figures.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    template = Path(__file__).with_name("demo_card.md").read_text(encoding="utf-8")
    rows = table(run, measured)
    minutes = run["seconds"] / 60
    (folder / "README.md").write_text(
        template.format(table=rows, minutes=minutes, **run), encoding="utf-8"
    )
    return rows


def table(run: dict, measured: dict[str, Figures]) -> str:
    rows = [
        (
            "| kind | tokens to train on | held-out perplexity | overlap by layer | mean | by "
            "popularity | use entropy |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for kind, values in measured.items():
        layers = " ".join(f"{value:.2f}" for value in values.overlap)
        means = " | ".join(
            f"{np.mean(of):.2f}" for of in (values.overlap, values.popularity, values.use_entropy)
        )
        rows.append(
            f"| {kind} | {run['corpus_tokens'][kind]:,} | {values.perplexity:.1f} | {layers} | "
            f"{means} |"
        )
    return "\n".join(rows)


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    return f"{os.cpu_count()} CPU cores ({cpu}, {platform.system()}), one thread, no GPU"
