"""Untrusted input: budgets, sizes, policies, prompts, data, tasks, and results of other tools."""

import gzip
import io
import json
import os
import random
import string
import zlib
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # set before huggingface_hub is imported, which reads it once

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from artifacts.hardware.machines import MACHINES, machine
from artifacts.modelshapes.known import unsized
from artifacts.shape import Shape
from artifacts.traces.synthetic import parse_dials
from moectl.bench.other_tools import read_results
from moectl.bench.request import BenchRequest
from moectl.commands.build.build_buddies import parse_alphas
from moectl.commands.build.profile import parse_shard
from moectl.commands.build.quantize import parse_bits
from moectl.shared.trace_source import TraceSource, open_source
from profilers.compare.tasks import check_tasks, load_tasks
from profilers.text.corpus import documents, token_sequences
from runtime.control import sizes
from runtime.policies import POLICIES
from runtime.policies.presets import presets
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tests.helpers import artefacts, families
from tools.lab.fit_synthetic import parse_hit_rates
from tools.lab.substitution import parse_shares
from tools.torments.cases import Lost
from tools.torments.hostile import (
    FRACTIONS,
    NUMBERS,
    TEXTS,
    Hostile,
    altered,
    as_text,
    damaged,
    odd,
    refusal,
    write,
)

_SHAPE = Shape(num_layers=3, num_experts=5, top_k=2, expert_nbytes=1000)
_UNITS = (
    "",
    "%",
    "x",
    "B",
    "KB",
    "KiB",
    "MB",
    "GiB",
    "TiB",
    "PiB",
    "GB/s",
    "KiB/s",
    "us",
    "ms",
    "s",
    "parsecs",
    "%%",
)
_ROWS = [
    {"text": "one line of text"},
    {"question": "How many?", "answer": "Four.", "id": 1},
    {"text": "ü" * 40},
]
_TASK = {
    "task": "asked",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "asked.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}
_LLAMA = {
    "build_commit": "b1",
    "n_prompt": 0,
    "n_gen": 128,
    "samples_ns": [10**9, 2 * 10**9],
    "model_type": "olmoe",
    "n_gpu_layers": 3,
    "gpu_info": "none",
}
_VLLM = {
    "median_ttft_ms": 10.0,
    "median_tpot_ms": 5.0,
    "output_throughput": 100.0,
    "model_id": "m",
    "completed": 3,
}
_PARSERS: tuple[Callable[[str], object], ...] = (
    sizes.nbytes,
    sizes.rate,
    lambda text: sizes.budget_nbytes(text, _SHAPE),
    lambda text: sizes.num_slots(text, _SHAPE, per_layer=True),
    parse_dials,
    parse_shard,
    lambda text: parse_bits(text, "refined"),
    parse_shares,
    parse_hit_rates,
    machine,
    lambda text: parse_alphas(text, 3),
    lambda text: Settings(budget=text, link=text, near=text, scope=text),
    lambda text: Settings(scaled_to=text),
    lambda text: Settings(preset=text),
    lambda text: BenchRequest(presets=text, budgets=text, links=text),
    lambda text: BenchRequest(scaled_to=text),
    lambda text: BenchRequest(tasks=text),
    lambda text: check_tasks([text]),
)


class HostileInputs(Hostile):
    """One input is odd, damaged or altered; read it, and use it if reading succeeds."""

    classes = (12, 13, 14, 21)

    def __init__(self, ground: Path) -> None:
        torch.set_num_threads(1)
        os.chdir(ground)  # texts that are paths are relative to this folder
        os.environ["HOME"] = str(ground)
        self._ground = ground
        self._tokenizer = families.character_tokenizer()
        model = families.save("olmoe", "hub", ground / "model")
        self._session = Session.open(model, Settings(budget="100%", link="disk", window="0B"))
        trace = artefacts.trace(12)
        shape = unsized(trace.num_layers, artefacts.SHAPE.num_experts, trace.top_k)
        self._workload = Workload(trace, shape, next(iter(MACHINES.values())))
        self._kinds = {
            "14: a budget": (6, self._budget),
            "14: another size, rate, share or name": (10, self._parsed),
            "14: a policy": (5, self._policy),
            "14: dials": (1, self._dials),
            "12: a prompt": (3, self._prompt),
            "13: a data file": (10, self._data),
            "13: a place of data": (3, self._place),
            "21: a task file": (0.3, self._task),
            "21: foreign results": (5, self._results),
        }

    def _budget(self, rng: random.Random) -> None:
        text = _size(rng)
        is_by_layer = rng.random() < 0.5

        def held() -> None:
            found = sizes.num_slots(text, _SHAPE, per_layer=is_by_layer)
            nbytes = sizes.budget_nbytes(text, _SHAPE)
            if not (
                1 <= found <= _SHAPE.num_keys
                and found * _SHAPE.expert_nbytes <= nbytes <= _SHAPE.nbytes
            ):
                raise Lost(f"14: budget {text!r} holds {found} experts and {nbytes} bytes")

        refusal(f"14: budget {text!r}", held)

    def _parsed(self, rng: random.Random) -> None:
        text = rng.choice((_size, _options, _any_text))(rng)
        parse = rng.choice(_PARSERS)
        refusal(
            f"14: {text[:60]!r} for number {_PARSERS.index(parse)} of the parsers",
            lambda: parse(text),
        )

    def _policy(self, rng: random.Random) -> None:
        axis = rng.choice(list(POLICIES))
        name = rng.choice(list(POLICIES[axis]))
        fields = [*POLICIES[axis][name].__dataclass_fields__, "x"]
        options = [f"{rng.choice(fields)}={_value(rng)}" for _ in range(rng.choice((1, 1, 2)))]
        text = f"{name}:{','.join(options)}"
        known = sorted(each.name for each in presets().values() if not each.waits_for)
        setting = Setting(
            "case",
            preset=rng.choice(known),
            policies={axis: text},
            budget=rng.choice(("50%", "4x")),
        )
        refusal(
            f"14: {setting.preset} with {axis} {text[:80]}", lambda: self._workload.run(setting)
        )

    def _dials(self, rng: random.Random) -> None:
        dial = rng.choice(("skew", "seed", "tokens", "batch", "requests", "prompt", "locality"))
        text = f"tokens=24,requests=2,prompt=3,{dial}={_value(rng)}"
        refusal(
            f"14: dials {text[:80]}",
            lambda: open_source(TraceSource(synthetic=text, num_experts=rng.choice((1, 8)))),
        )

    def _prompt(self, rng: random.Random) -> None:
        text = rng.choice(TEXTS) + "".join(
            rng.choices("ab ~\n\0\u200bü", k=rng.choice((0, 1, 5, 400)))
        )
        given = {
            "max_new_tokens": rng.choice((0, 1, 2, 300)),
            "temperature": rng.choice((0.0, 1.0, *FRACTIONS)),
            "top_p": rng.choice((1.0, 0.1, *FRACTIONS)),
            "top_k": rng.choice((0, 1, 50, *NUMBERS)),
            "repetition_penalty": rng.choice((1.0, 2.0, *FRACTIONS)),
        }

        def answered() -> None:
            sampling = Sampling(**given)
            for _ in self._session.tokens(self._session.encode(text), sampling):
                pass

        refusal(f"12: prompt {text[:20]!r} with {given}", answered)

    def _data(self, rng: random.Random) -> None:
        path, said = self._data_file(rng)
        refusal(f"13: {said}", lambda: self._tokens(str(path)))

    def _data_file(self, rng: random.Random) -> tuple[Path, str]:
        name = rng.choice(("a.txt", "a", "a.jsonl", "a.jsonl", "a.parquet", "a.parquet"))
        rows = [
            altered(row, rng) if rng.random() < 0.5 else row
            for row in rng.choices(_ROWS, k=rng.randrange(4))
        ]
        raw = (
            _parquet(rows, rng)
            if name == "a.parquet"
            else _text(rows, rng).encode("utf-8", "surrogatepass")
        )
        if rng.random() < 0.4:
            raw = damaged(raw, rng)
        if rng.random() < 0.3:
            name = f"{name}.gz"
            raw = gzip.compress(raw, mtime=0)
            raw = damaged(raw, rng) if rng.random() < 0.5 else raw
        return write(self._ground / name, raw), name

    def _tokens(self, spec: str) -> None:
        sequences = token_sequences(documents(spec), self._tokenizer, length=16, num_tokens=64)
        if not all(len(sequence) > 1 for sequence in sequences):
            raise Lost(f"13: {spec[:60]!r} has a sequence that predicts nothing")

    def _place(self, rng: random.Random) -> None:
        text = (
            rng.choice(("", "builtin:", "hf:", "/dev/", "~", "model/", "*", "./"))
            + _any_text(rng)[:300]
        )
        if text.startswith("hf:") and ":" not in text[3:]:
            text += ":a:b:c"  # any other name would be looked up on the hub
        refusal(f"13: data {text[:60]!r}", lambda: self._tokens(text))

    def _task(self, rng: random.Random) -> None:
        rows = [
            {"question": "How many?", "choices": ["1", "2"], "answer": 0},
            {"question": "Why?", "choices": ["a"]},
        ]
        write(
            self._ground / "asked.jsonl",
            "".join(as_text(altered(row, rng), rng) + "\n" for row in rows),
        )
        ran = self._ground / "ran"
        write(self._ground / "code.py", f"open({str(ran)!r}, 'w')\ndef run(*_):\n    return 'x'\n")
        text = as_text(altered(_TASK, rng), rng) if rng.random() < 0.6 else json.dumps(_TASK)
        if rng.random() < 0.3:
            text = text.replace(
                '"{{choices}}"',
                rng.choice(("!function code.run", "!!python/name:os.system", "*a")),
                1,
            )
        content = text.encode("utf-8", "replace")
        path = write(
            self._ground / "asked.yaml", damaged(content, rng) if rng.random() < 0.2 else content
        )
        refusal("21: a task file", lambda: load_tasks([str(path)]))
        if ran.exists():
            ran.unlink()
            raise Lost("21: a task file ran code that lay beside it")

    def _results(self, rng: random.Random) -> None:
        found = [altered(rng.choice((_LLAMA, _VLLM)), rng) for _ in range(rng.choice((0, 1, 2)))]
        content = as_text(found if rng.random() < 0.7 else odd(rng), rng).encode("utf-8", "replace")
        path = write(
            self._ground / "results.json", damaged(content, rng) if rng.random() < 0.2 else content
        )
        refusal("21: foreign results", lambda: read_results(path))


def _size(rng: random.Random) -> str:
    number = rng.choice(
        (
            lambda: str(rng.randrange(20)),
            lambda: f"{rng.random() * 10 ** rng.randrange(-5, 20):.{rng.randrange(4)}f}",
            lambda: f"{rng.randrange(10)}e{rng.randrange(-400, 400)}",
            lambda: str(rng.choice((*NUMBERS, *FRACTIONS))),
            lambda: rng.choice((".5", "5.", "1_000", "٣", "0x10", "+5", "- 5", "9" * 5000, "")),
        )
    )()
    text = f"{number}{rng.choice(('', '', ' '))}{rng.choice(_UNITS)}"
    return text if rng.random() < 0.8 else f"{text}+{rng.randrange(100)}{rng.choice(_UNITS)}"


def _options(rng: random.Random) -> str:
    names = (
        "skew",
        "tokens",
        "lru",
        "lru:10",
        "0",
        "1/2",
        "seed",
        "2",
        "builtin",
        rng.choice(list(presets())),
    )
    parts = [
        f"{rng.choice(names)}{rng.choice((':', '=', '/', ''))}{_value(rng)}"
        for _ in range(rng.choice((1, 2, 3)))
    ]
    return rng.choice((",", "/", ":", "+")).join(parts)


def _any_text(rng: random.Random) -> str:
    letters = string.printable + "é\u2028\x00\ud800%/,:=+~*"
    return rng.choice(
        (rng.choice(TEXTS), "".join(rng.choices(letters, k=rng.choice((1, 3, 10, 40)))))
    )


def _value(rng: random.Random) -> str:
    return rng.choice(
        (
            lambda: str(rng.choice(NUMBERS)),
            lambda: str(rng.choice(FRACTIONS)),
            lambda: rng.choice(
                (
                    "",
                    "yes",
                    "no",
                    "None",
                    "x",
                    "uniform",
                    "drop",
                    "1e9",
                    "-0.5",
                    "9" * 5000,
                    "0.25",
                    "٣",
                )
            ),
        )
    )()


def _text(rows: list, rng: random.Random) -> str:
    return "\n".join(as_text(row, rng) for row in rows)


def _parquet(rows: list, rng: random.Random) -> bytes:
    sink = io.BytesIO()
    for kind in (None, pa.string(), pa.large_string(), pa.binary(), pa.timestamp("ns"), pa.int64()):
        try:
            values = [rng.choice((*TEXTS[:6], 10**12, None)) if kind else row for row in rows]
            columns = {
                "text": pa.array([str(value) for value in values]),
                "more": pa.array(values, kind),
            }
            is_plain = kind is None and rng.random() < 0.5
            pq.write_table(pa.Table.from_pylist(rows) if is_plain else pa.table(columns), sink)
            return sink.getvalue()
        except (pa.ArrowException, OverflowError, ValueError, TypeError, AttributeError):
            sink = io.BytesIO()
    return zlib.compress(b"no parquet")
