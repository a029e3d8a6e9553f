"""Trains the bundled model: a small OLMoE on text that every CPython ships and on generated word
problems.

`python -m tools.make.demo_model --minutes 40` makes moectl/demo/ anew: checkpoint, tokenizer,
figures and card. With `--hidden 96 --intermediate 64 --experts 24 --out FOLDER` it makes a model
with experts of other shapes, without a card. The state is kept in `--work` while training, and the
same command goes on from it.
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

from tools.make.demo_figures import measure, write_card
from tools.make.demo_text import SHARES, kind_documents, present_kinds

VOCAB_SIZE = 2048
BUNDLED = (128, 32, 32)  # its hidden size, the experts' intermediate size, experts of a layer
BOUNDARY = "<|endoftext|>"
PADDING = "<|pad|>"
TOKENS_A_STEP = 2048
LENGTHS = (256,) * 7 + (
    1024,
)  # of the sequences of a step, in turn: the long ones teach positions up to the model's last
PEAK_RATE = 3e-3
LAST_RATE = 0.02
WARM_UP = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of a training run; `steps` is 0 until it has been worked out from `minutes`."""

    steps: int
    minutes: float
    seed: int
    out: Path
    work: Path
    hidden: int
    intermediate: int
    experts: int

    @property
    def is_bundled(self) -> bool:
        """True if the model has the shape of the bundled one, which its card describes."""
        return (self.hidden, self.intermediate, self.experts) == BUNDLED


def train_tokenizer(texts: dict[str, list[str]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over an equal amount of each kind; digits stay single, so that sums can be
    learned."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOUNDARY, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (excerpt for kind in texts.values() for excerpt in excerpts(kind, 400_000)), trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOUNDARY,
        eos_token=BOUNDARY,
        pad_token=PADDING,
        model_max_length=1024,
    )


def excerpts(texts: list[str], num_characters: int) -> list[str]:
    """The beginning of every text, `num_characters` of them together."""
    share = num_characters / max(1, sum(map(len, texts)))
    return [text[: math.ceil(len(text) * share)] for text in texts]


def token_stream(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """All texts one after another, the boundary token before each: uint16 [N]."""
    ids = tokenizer(texts, add_special_tokens=False).input_ids
    return np.concatenate(
        [np.array([tokenizer.bos_token_id, *document], dtype=np.uint16) for document in ids]
    )


def new_model(plan: Plan) -> OlmoeForCausalLM:
    torch.manual_seed(plan.seed)
    config = OlmoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=plan.hidden,
        intermediate_size=plan.intermediate,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=plan.experts,
        num_experts_per_tok=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.005,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    model = OlmoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model.train()


def batch(streams: dict[str, np.ndarray], step: int, *, seed: int) -> torch.Tensor:
    """Windows of the streams, each of one kind: int64 [B, T]. Given by seed and step alone, also in
    a resumed run."""
    random = np.random.default_rng([seed, step])
    length = LENGTHS[step % len(LENGTHS)]
    shares = np.array([SHARES[kind] for kind in streams])
    kinds = random.choice(list(streams), size=TOKENS_A_STEP // length, p=shares / shares.sum())
    windows = [window(streams[kind], length, random) for kind in kinds]
    return torch.from_numpy(np.stack(windows).astype(np.int64))


def window(stream: np.ndarray, length: int, random: np.random.Generator) -> np.ndarray:
    start = random.integers(len(stream) - length)
    return stream[start : start + length]


def rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to `LAST_RATE` of the peak."""
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    progress = (step - WARM_UP) / max(1, steps - WARM_UP)
    return PEAK_RATE * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * progress)) / 2)


def new_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    *,
    learning_rate: float,
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    loss = model(input_ids=ids, labels=ids, output_router_logits=True, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def steps_within(plan: Plan, streams: dict[str, np.ndarray]) -> int:
    """Return the number of steps that fit into the plan's minutes, by the time of a few steps of a
    model that is thrown away."""
    model = new_model(plan)
    optimizer = new_optimizer(model)
    times = []
    for step in range(12):
        start = time.perf_counter()
        train_step(model, optimizer, batch(streams, step, seed=plan.seed), learning_rate=0.0)
        times.append(time.perf_counter() - start)
    return max(1, int(60 * plan.minutes / (sum(times[4:]) / len(times[4:]))))


def train(plan: Plan, streams: dict[str, np.ndarray]) -> tuple[OlmoeForCausalLM, dict]:
    """The trained model in float32 and what the run was: steps, tokens, seconds."""
    model = new_model(plan)
    optimizer = new_optimizer(model)
    run = restore(plan, model, optimizer) or new_run(plan, streams)
    print(f"{run['steps']} steps of {TOKENS_A_STEP} tokens, from step {run['step']}", flush=True)
    while run["step"] < run["steps"]:
        start = time.perf_counter()
        ids = batch(streams, run["step"], seed=plan.seed)
        loss = train_step(model, optimizer, ids, learning_rate=rate(run["step"], run["steps"]))
        run["step"] += 1
        run["tokens"] += ids.numel()
        run["seconds"] += time.perf_counter() - start
        if run["step"] % 50 == 0:
            print(f"step {run['step']} loss {loss:.3f} {run['seconds']:.0f} s", flush=True)
        if run["step"] % 200 == 0 or run["step"] == run["steps"]:
            keep(plan.work, model, optimizer, run)
    return model.eval(), run


def new_run(plan: Plan, streams: dict[str, np.ndarray]) -> dict:
    steps = plan.steps or steps_within(plan, streams)
    return {"seed": plan.seed, "step": 0, "steps": steps, "tokens": 0, "seconds": 0.0}


def keep(work: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, run: dict) -> None:
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "run": run},
        work / "state.new",
    )
    (work / "state.new").replace(work / "state.pt")


def restore(plan: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict | None:
    """Load the weights and the optimizer of the unfinished run in `plan.work`, and return its
    record; None if there is none.

    Exits if the plan asks for another seed or other steps.
    """
    if not (plan.work / "state.pt").is_file():
        return None
    state = torch.load(plan.work / "state.pt", weights_only=True)
    run = state["run"]
    if plan.seed != run["seed"] or plan.steps not in (0, run["steps"]):
        told = f"--steps {run['steps']} --seed {run['seed']}"
        sys.exit(
            f"{plan.work} holds an unfinished run with {told}: give the same, another --work, or "
            "remove it"
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return run


def arguments() -> Plan:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=0, help="training steps; by default as many as fit --minutes"
    )
    parser.add_argument("--minutes", type=float, default=40.0, help="time for training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("moectl/demo"))
    for name, size in zip(("hidden", "intermediate", "experts"), BUNDLED, strict=True):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("build/demo_train"),
        help="folder for the state of an unfinished run",
    )
    return Plan(**vars(parser.parse_args()))


def training_texts() -> dict[str, list[str]]:
    kinds = present_kinds()
    print("kinds of text:", ", ".join(kinds), flush=True)
    if "headers" not in kinds:
        print(
            "no C headers: install the development files of Python to train on them too", flush=True
        )
    return {
        kind: [document.text for document in kind_documents(kind, held_out=False)] for kind in kinds
    }


def main() -> None:
    plan = arguments()
    plan.work.mkdir(parents=True, exist_ok=True)
    plan.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the matrices are small: a second thread waits more than it works
    texts = training_texts()
    tokenizer = train_tokenizer(texts)
    streams = {kind: token_stream(texts[kind], tokenizer) for kind in texts}
    model, run = train(plan, streams)
    model.to(torch.bfloat16).save_pretrained(plan.out)
    (plan.out / "model.safetensors").chmod(0o644)  # safetensors leaves it to its owner alone
    tokenizer.save_pretrained(plan.out)
    run["corpus_tokens"] = {kind: len(stream) for kind, stream in streams.items()}
    if plan.is_bundled:
        print(write_card(plan.out, run, measure(plan.out)))
    (plan.work / "state.pt").unlink()


if __name__ == "__main__":
    main()
