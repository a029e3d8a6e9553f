"""Decoding at batch 1 with every expert resident: moectl beside transformers' experts
implementations and llama.cpp.

A section of tools.bench.decode. Every implementation decodes the same tokens with the same weights
in one process, in alternating rounds; ratios are taken within a round, so that other load of the
machine affects all alike.
"""

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from artifacts.errors import BadInput
from artifacts.formats.dense import DENSE
from profilers.compare.llama_cpp import LlamaCpp, check_installed
from profilers.export.gguf import export_gguf
from runtime.devices import wait_for_compute
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings
from runtime.session.settings import FUSED
from tools.bench.measuring import in_turns, output_of
from tools.bench.performance import Ratio, Section, Table

STOCK = ("eager", "grouped_mm", "batched_mm")
OURS = {"moectl": Settings("full"), "moectl, experts fused": Settings("full", experts=FUSED)}
FEW_BITS = {
    f"moectl, experts fused, dense {bits}": Settings("full", experts=FUSED, dense=bits)
    for bits in DENSE
}
"""Besides, in bfloat16 alone: in float32 so many copies of a model would not fit into memory."""
LLAMA_CPP = {torch.bfloat16: "bf16", torch.float32: "f32"}  # the types of its files
SAME_FILES = {
    "q8_0": 8,
    "q4_0": 4,
}  # types of files, and the width of dense weights that moectl reads them with
PROMPT = 16  # tokens
OLMOE_SIZED = [
    "--layers",
    "2",
    "--experts",
    "64",
    "--top-k",
    "8",
    "--hidden",
    "2048",
    "--intermediate",
    "1024",
]
OLMOE_SHAPED = [
    "--layers",
    "16",
    "--experts",
    "64",
    "--top-k",
    "8",
    "--hidden",
    "512",
    "--intermediate",
    "256",
]

log = logging.getLogger("bench_decode")


@dataclass(frozen=True, slots=True)
class Contender:
    """A name, and a function that decodes ids [1, PROMPT + tokens] and returns the seconds of each
    decoded token."""

    name: str
    decode: Callable[[torch.Tensor], Sequence[float]]


def measure(models: dict[str, Path], *, rounds: int, tokens: int) -> Section:
    """Tables of every model, in bfloat16 and float32. Ratios are to the fastest of transformers'
    implementations."""
    tables = []
    for name, folder in models.items():
        tables += [table(name, folder, dtype, rounds=rounds, tokens=tokens) for dtype in LLAMA_CPP]
        tables += same_files(name, folder, rounds=rounds, tokens=tokens)
    return Section("resident", tables)


def table(name: str, folder: Path, dtype: torch.dtype, *, rounds: int, tokens: int) -> Table:
    """One model in one dtype, on the CPU."""
    stock = plain_model(folder, dtype=dtype)
    contenders = [Contender(each, partial(_decode_with, stock, each)) for each in STOCK]
    ids = torch.from_numpy(
        np.random.default_rng(0).integers(3, stock.config.vocab_size, (1, PROMPT + tokens))
    )
    with ExitStack() as stack:
        ours = OURS | (FEW_BITS if dtype is torch.bfloat16 else {})
        for own, settings in ours.items():
            opened = open_model(str(folder), dtype=dtype, dense=settings.dense)
            session = stack.enter_context(Session(opened, settings))
            contenders.append(Contender(own, partial(decode_seconds, session.opened.model)))
        contenders += _llama_cpp(
            stack, open_model(str(folder), dtype=dtype), folder, num_tokens=ids.shape[1]
        )
        seconds = run_rounds(contenders, ids, rounds=rounds)
    return _table(name, str(dtype).removeprefix("torch."), seconds, rounds=rounds, tokens=tokens)


def same_files(
    name: str, folder: Path, *, rounds: int, tokens: int, threads: int = 1
) -> list[Table]:
    """One table of GGUF files in few bits, each read by moectl, with tokens as computed and rounded
    to 8 bits, and by llama.cpp; none where that cannot be."""
    rows = []
    ratios = {}
    for type_, dense in SAME_FILES.items():
        with ExitStack() as stack:
            path = exported(stack, open_model(str(folder), dtype=torch.bfloat16), folder, type_)
            if path is None:
                return []
            settings = Settings("full", experts=FUSED, dense=dense, threads=threads)
            rounded = replace(settings, activations=8)
            sessions = [
                stack.enter_context(Session(open_model(str(path), dense=dense), own))
                for own in (settings, rounded)
            ]
            vocab_size = sessions[0].opened.model.config.vocab_size
            ids = torch.from_numpy(
                np.random.default_rng(0).integers(3, vocab_size, (1, PROMPT + tokens))
            )
            llama = LlamaCpp(path, threads=threads, num_tokens=ids.shape[1], vocab_size=vocab_size)
            contenders = [
                Contender(own, partial(decode_seconds, session.opened.model))
                for own, session in zip(("", ", activations 8"), sessions, strict=True)
            ]
            theirs = Contender("theirs", partial(decode_by_llama_cpp, llama))
            seconds = run_rounds([*contenders, theirs], ids, rounds=rounds)
        of_llama = seconds.pop("theirs")
        for own, each in seconds.items():
            ratios[f"{name}, {type_} file{own}"] = ratio = Ratio.of(each, of_llama)
            medians = (f"{median(times) * 1e3:.2f}" for times in (each, of_llama))
            rows.append((f"{type_}{own}", *medians, *ratio.cells()))
    columns = (
        "GGUF file",
        "moectl, ms/token",
        "llama.cpp, ms/token",
        "ratio",
        "quartiles of the ratio",
    )
    note = (
        "experts fused and `--dense` of as many bits; llama.cpp rounds activations to 8 bits, "
        f"moectl does with `--activations 8`; {threads} thread{'s' * (threads > 1)}"
    )
    return [Table(f"{name}, the same file in few bits", columns, rows, note, ratios)]


def _llama_cpp(
    stack: ExitStack, opened: MoeModel, folder: Path, *, num_tokens: int
) -> list[Contender]:
    """llama.cpp on the same weights, where it is installed and can read them."""
    type_ = LLAMA_CPP[opened.dtype]
    path = exported(stack, opened, folder, type_)
    if path is None:
        return []
    llama = LlamaCpp(
        path, threads=1, num_tokens=num_tokens, vocab_size=opened.model.config.vocab_size
    )
    return [Contender(f"llama.cpp {type_}", partial(decode_by_llama_cpp, llama))]


def exported(stack: ExitStack, opened: MoeModel, folder: Path, type_: str) -> Path | None:
    """The model as a GGUF file that goes with `stack`; None where llama.cpp is not installed or
    would not read it."""
    path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model.gguf"
    try:
        check_installed()
        export_gguf(opened, folder, path, type_)
    except BadInput as problem:
        log.warning("without llama.cpp: %s", problem)
        return None
    return path


def _table(
    name: str, dtype: str, seconds: dict[str, list[float]], *, rounds: int, tokens: int
) -> Table:
    fastest = min(STOCK, key=lambda each: median(seconds[each]))
    ratios = {each: Ratio.of(own, seconds[fastest]) for each, own in seconds.items()}
    peers = [each for each in seconds if each.startswith("llama.cpp")]
    return Table(
        f"{name}, {dtype}",
        (
            "implementation",
            "ms/token",
            f"ratio to {fastest}",
            "quartiles of the ratio",
            *(f"to {each}" for each in peers),
        ),
        [
            (
                each,
                f"{median(own) * 1e3:.2f}",
                *ratios[each].cells(),
                *_medians(own, [seconds[peer] for peer in peers]),
            )
            for each, own in seconds.items()
        ],
        f"medians over {rounds} rounds of {tokens} tokens; each round begins with another",
        {f"{name}, {dtype}, {each}": ratios[each] for each in seconds if each in OURS | FEW_BITS},
    )


def _medians(own: list[float], others: list[list[float]]) -> list[str]:
    """Median ratios to others, round by round."""
    return [f"{Ratio.of(own, other).median:.2f}" for other in others]


def plain_model(
    folder: Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """The model as transformers loads it, with copied weights: views of a file are misaligned,
    which costs time."""
    options = {"experts_implementation": "eager"} | ({"dtype": dtype} if dtype else {})
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval().to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def run_rounds(
    contenders: list[Contender], ids: torch.Tensor, *, rounds: int
) -> dict[str, list[float]]:
    """Median seconds of a token per contender and round, after one round for warm-up. Each round
    begins with another contender."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn, contender in in_turns(contenders, rounds + 1):
        steps = contender.decode(ids)
        if turn:
            seconds[contender.name].append(median(steps))
    return seconds


def _decode_with(model: PreTrainedModel, implementation: str, ids: torch.Tensor) -> list[float]:
    model.set_experts_implementation(implementation)
    return decode_seconds(model, ids)


def decode_by_llama_cpp(llama: LlamaCpp, ids: torch.Tensor) -> Sequence[float]:
    return llama.read([ids[0].numpy()], prefill=PROMPT).decode_s


@torch.inference_mode()
def decode_seconds(
    model: PreTrainedModel, ids: torch.Tensor, *, after_prompt: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds of each decode step over given `ids` [1, PROMPT + tokens] (teacher-forced)."""
    past = model(input_ids=ids[:, :PROMPT], use_cache=True).past_key_values
    after_prompt()
    seconds = []
    for position in range(PROMPT, ids.shape[1]):
        token = ids[:, position : position + 1]
        begin_s = time.perf_counter()
        past = model(input_ids=token, past_key_values=past, use_cache=True).past_key_values
        wait_for_compute(ids.device)
        seconds.append(time.perf_counter() - begin_s)
    return seconds


@contextmanager
def random_model(*shape: str) -> Iterator[Path]:
    """A checkpoint of random weights in a temporary folder; `shape` as tools.make.checkpoint takes
    it."""
    with tempfile.TemporaryDirectory() as folder:
        output_of("tools.make.checkpoint", folder, *shape)
        yield Path(folder)
