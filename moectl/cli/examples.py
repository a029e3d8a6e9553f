"""What to type: two or three examples of each command, which its `--help` shows. A plain `moectl
COMMAND` uses the bundled model; `MODEL` stands for a folder, a GGUF file or a hub id."""

EXAMPLES = {
    "demo": ("moectl demo", "moectl demo --picture demo.svg"),
    "run": (
        'moectl run MODEL -p "Why is the sky blue?" -n 64',
        "moectl run MODEL --budget 8GB",
        'moectl run --preset horizon --budget 25% -p "Return the number of"',
    ),
    "chat": ("moectl chat MODEL", "moectl chat MODEL --preset horizon --budget 8GB"),
    "generate": (
        "moectl generate MODEL --data prompts.jsonl --out answers.jsonl",
        "moectl generate MODEL --data prompts.jsonl --out answers.jsonl -n 256",
    ),
    "serve": (
        "moectl serve MODEL --port 8000",
        "moectl serve MODEL --budget 8GB -c 8192 --batch 8",
        "moectl serve --host 0.0.0.0 --api-key secret",
    ),
    "plan": (
        "moectl plan qwen3-30b-a3b --machine rtx4090",
        "moectl plan gpt-oss-120b --vram 12GB --ram 64GB -c 16384",
        "moectl plan bundled --vram 1079MB --machine rtx4090 --simulate",
    ),
    "advise": (
        "moectl advise gpt-oss-20b --machine rtx5070 --ram 64GB",
        "moectl advise MODEL --machine rtx4090 --for freetoken --trace my.parquet",
        'moectl advise gpt-oss-20b --machine rtx5070 --what-if "+8GiB vram, pcie5"',
    ),
    "models": ("moectl models", "moectl models --json"),
    "doctor": ("moectl doctor", "moectl doctor MODEL --measure"),
    "bench": (
        "moectl bench MODEL --budgets 25%,50% --presets on-demand,horizon",
        "moectl bench MODEL --data my-text.txt --tokens 2048",
        "moectl bench --budgets 25% --tokens 256 --simulate",
    ),
    "price": (
        "moectl price MODEL --data my-text.txt --budget 25%",
        "moectl price --shortcuts drop,pruned --picture prices.svg",
    ),
    "tune": ("moectl tune MODEL --budget 25% --max-loss 1%", "moectl tune MODEL --budget 8GB"),
    "simulate": (
        "moectl simulate --trace gpt-oss-20b --compare lru,class_lru,horizon "
        "--budget 25% --machine rtx4090-pcie4",
        "moectl simulate --trace my.parquet --num-experts 64 --budget 12.5%",
    ),
    "report": ("moectl report report.html", "moectl report pictures"),
    "fit-trace": (
        "moectl fit-trace --like trace.parquet",
        "moectl fit-trace --hits lru:10=.23,20=.4 -m mixtral-8x7b",
    ),
    "profile": (
        "moectl profile MODEL --tokens 8192",
        "moectl profile MODEL --data my-text.txt",
        "moectl profile --hardware MODEL",
    ),
    "build-buddies": ("moectl build-buddies", "moectl build-buddies --metric coactivation"),
    "quantize": ("moectl quantize MODEL --bits 1,2,3,4", "moectl quantize MODEL --bits 4"),
    "split": ("moectl split --budget 25%", "moectl split --budget 12.5% --machine 5gbps"),
    "build-maps": (
        "moectl build-maps MODEL --tokens 4096",
        "moectl build-maps MODEL --data my-text.txt --capacity 2000",
    ),
    "build-predictor": (
        "moectl build-predictor MODEL --tokens 6000",
        "moectl build-predictor MODEL --data my-text.txt --distance 2",
    ),
    "inspect": (
        "moectl inspect",
        "moectl inspect presets",
        "moectl inspect buddies --layer 0",
    ),
    "export": (
        "moectl export --what override-tensor --budget 50%",
        "moectl export --what gguf --type q8_0 --out bundled.gguf",
    ),
    "merge": (
        "moectl merge first.duckdb second.duckdb --store moe.duckdb",
        "moectl merge first.duckdb second.duckdb",
    ),
    "import-trace": (
        "moectl import-trace routing.csv --as csv",
        "moectl import-trace routing.log --as llama.cpp --out my.parquet",
    ),
    "pack": ("moectl pack MODEL FOLDER", "moectl pack bundled packed-demo"),
}
"""By the name of the command."""


def epilog(command: str) -> str | None:
    """Return the end of the help of a command: its examples, a line each."""
    lines = EXAMPLES.get(command)
    return "Examples:\n\n" + "\n\n".join(lines) if lines else None
