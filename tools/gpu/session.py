"""Measurements for a machine that one has for minutes, in stages:

    python -m tools.gpu.session 1 --out session.jsonl

The first two take five minutes each and say what matters most. Stage 1, is it right: the machine,
exactness, kernels, published formats, replicas. Stage 2, is it fast: the link, and every way to
decode a token of two shapes, with the kernels and calls of a token, beside llama.cpp if `--peer`
has a file that `llama-bench -o json` wrote. Stage 3: tokens as CUDA graphs against launches one
by one, passes that verify drafts, decisions on the host against those on the device, page-locking,
overlap. Stages 4 to 6:
tools.gpu.bench of OLMoE's, Qwen3-30B-A3B's and Mixtral's shapes, and Accelerate. Stage 7, four
minutes: statements of papers on docs/lab/reproduction.md that a GPU settles. Each group of
measurements runs in a process of its own with its own limit; each result is written at once as a
line of JSON, and a table at the end. It needs no network, neither duckdb nor datasets, and numba
only where experts are computed on the host.

`--device cpu --tiny` tries all of it on any machine; its figures say nothing about a GPU.
"""

import argparse
import shutil
from pathlib import Path

import torch

from tools.arguments import parser_of
from tools.gpu.groups import Group, run_groups

LIMITS_S = {1: 300.0, 2: 300.0, 3: 480.0, 4: 360.0, 5: 540.0, 6: 480.0, 7: 240.0}
_SHOWN = ("detail", "version", "text", "settles", "why_not")  # of a line, as they are


def main() -> None:
    options = _options()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU is visible to torch: nothing was measured (--device cpu --tiny rehearses it)")
        return
    groups = stage(options.stage, device=options.device, tiny=options.tiny, peer=options.peer)
    limit_s = options.limit or LIMITS_S[options.stage]
    table = markdown(options.stage, run_groups(groups, options.out, limit_s=limit_s))
    options.out.with_suffix(f".stage{options.stage}.md").write_text(table, encoding="utf-8")
    print(table)


def stage(number: int, *, device: str, tiny: bool, peer: str = "") -> list[Group]:
    """The groups of one stage, the most telling first: a later one may find no time. `peer` is a
    file of llama-bench."""
    own = ("--device", device, *(["--tiny"] if tiny else []))

    def probe(name: str, limit_s: float) -> Group:
        arguments = own if name != "machine" else ()
        return Group(name, f"tools.gpu.probes.{name}", arguments, limit_s)

    def check(name: str, limit_s: float) -> Group:
        sizes = ("--layers", "1", "--tokens", "4") if tiny else ()
        return Group(
            name, "tools.gpu.check", ("--group", name, "--device", device, *sizes), limit_s
        )

    def bench(model: str, limit_s: float, *more: str) -> Group:
        sizes = (
            ("--prompt", "8", "--tokens", "2", "--sequences", "1", "--long-prompt", "16")
            if tiny
            else ()
        )
        sizes += ("--budgets", "25%") if tiny else ()
        arguments = (
            "--models",
            model,
            "--limit",
            str(0.85 * limit_s),
            "--lines",
            *own,
            *more,
            *sizes,
        )
        return Group(f"bench {model}", "tools.gpu.bench", arguments, limit_s)

    def tokens(model: str, limit_s: float, *more: str) -> Group:
        sizes = ("--prompt", "8", "--tokens", "10", "--sequences", "1") if tiny else ()
        own_limit = ("--limit", str(0.8 * limit_s), "--models", model)
        arguments = (*own_limit, "--peer", peer, *own, *more, *sizes)
        return Group(f"tokens {model}", "tools.gpu.probes.tokens", arguments, limit_s)

    layers = "2" if tiny else "24"
    stages = {
        1: [
            probe("machine", 30),
            check("exact-float32", 80),
            check("exact-bfloat16", 60),
            check("kernels", 80),
            check("formats", 80),
            check("replicas", 60),
            *_sanitizer(device, tiny=tiny),
        ],
        2: [
            tokens("olmoe-1b-7b", 170, "--profile", "all"),
            tokens("qwen3-30b-a3b", 130, "--layers", layers),
            probe("link", 30),
        ],
        3: [
            probe("captured", 75),
            probe("verified", 60),
            probe("road", 75),
            probe("graph", 60),
            probe("pages", 90),
            check("speed", 120),
        ],
        4: [bench("olmoe-1b-7b", 330)],
        5: [bench("qwen3-30b-a3b", 520, "--budgets", "50%", "25%", "12.5%")],
        6: [
            bench("mixtral-8x7b", 300),
            bench("olmoe-1b-7b", 160, "--budgets", "25%", "--only", "Accelerate"),
        ],
        7: [tokens("olmoe-1b-7b", 240, "--statements")],
    }
    needs_gpu = {"kernels", "formats"}
    return [group for group in stages[number] if device != "cpu" or group.name not in needs_gpu]


def _sanitizer(device: str, *, tiny: bool) -> list[Group]:
    """A small run under CUDA's memory checker, where it is installed."""
    if device == "cpu" or shutil.which("compute-sanitizer") is None:
        return []
    return [Group("sanitizer", "tools.gpu.probes.sanitizer", ("--device", device), 90.0)]


def markdown(number: int, lines: list[dict]) -> str:
    """A table with a row for each line, group by group."""
    rows = [f"**Stage {number}**", "", "| group | what | result |", "|---|---|---|"]
    rows += [f"| {line['group']} | {_what(line)} | {_result(line)} |" for line in lines]
    return "\n".join(rows) + "\n"


def _what(line: dict) -> str:
    if "ended" in line:
        return "the group"
    return ", ".join(str(line[key]) for key in ("name", "budget") if line.get(key))


def _result(line: dict) -> str:
    if "ended" in line:
        return f"ended {line['ended']}, {line['seconds']:.0f} s".replace("|", "/")
    verdict = [{True: "passed", False: "FAILED"}[line["passed"]]] if "passed" in line else []
    told = [str(line[key]) for key in _SHOWN if line.get(key)]
    figures = [f"{key} {_number(one)}" for key, one in line.items() if _is_number(one)]
    return "; ".join([*verdict, *told, *figures]).replace("|", "/").replace("\n", " ")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        out=(Path("session.jsonl"), "lines of JSON are appended here"),
        limit=(float, "seconds of the stage"),
        peer=("", "file that `llama-bench -o json` wrote on this machine"),
        device="cuda",
        tiny=(False, "very small sizes, to try the session itself"),
    )
    parser.add_argument("stage", type=int, choices=LIMITS_S)
    return parser.parse_args()


if __name__ == "__main__":
    main()
