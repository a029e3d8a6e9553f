"""Peak resident memory of a model run from disk at a budget, beside plain transformers: one process each.

    python -m tools.peak_memory

makes a random checkpoint of 2 GB (OLMoE's shape, published layout) in a temporary folder, runs it in four ways, prints
a table and, with --out, writes the figures as JSON.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from moectl.render import Sheet, human_bytes, show_sheet

SHAPE = ("--family", "olmoe", "--layers", "10", "--experts", "64", "--hidden", "1024", "--intermediate", "512")
WAYS = {
    "imports alone": None,
    "plain transformers": "plain",
    "moectl, 25 % on disk link": "25%",
    "moectl, one expert a layer": "10x",
}
PROMPT_TOKENS, NEW_TOKENS = 64, 16


def main() -> None:
    options = _options()
    if options.measure:
        print(json.dumps(measure(options.measure, options.folder)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        checkpoint = Path(scratch) / "checkpoint"
        _python("tools/make_checkpoint.py", str(checkpoint), *SHAPE)
        size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        figures = {way: _child(kind, checkpoint) for way, kind in WAYS.items()}
    show_sheet(sheet(figures, size))
    if options.out:
        options.out.write_text(json.dumps({"checkpoint_bytes": size, "ways": figures}, indent=1))


def measure(kind: str, folder: Path) -> dict[str, float]:
    """What one way of running costs this process: bytes and seconds per token."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    prompt = torch.randint(1, 256, (1, PROMPT_TOKENS))
    held, seconds = {"imports": _imports, "plain": _plain}.get(kind, lambda *_: _offloaded(kind, *_))(folder, prompt)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_bytes": peak, "held_bytes": held, "ms_per_token": seconds * 1e3}


def _imports(folder: Path, prompt: torch.Tensor) -> tuple[int, float]:
    import runtime.session  # noqa: F401  what every other way has imported too

    return 0, 0.0


def _plain(folder: Path, prompt: torch.Tensor) -> tuple[int, float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    begin_s = time.perf_counter()
    model.generate(prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    return experts, (time.perf_counter() - begin_s) / NEW_TOKENS


def _offloaded(budget: str, folder: Path, prompt: torch.Tensor) -> tuple[int, float]:
    from runtime.generate import Sampling
    from runtime.session import Session, Settings

    with Session.open(str(folder), Settings(budget=budget, link="disk")) as session:
        begin_s = time.perf_counter()
        list(session.generate(prompt, Sampling(NEW_TOKENS, ignore_eos=True)))
        return session.slots.numel(), (time.perf_counter() - begin_s) / NEW_TOKENS


def sheet(figures: dict[str, dict[str, float]], size: int) -> Sheet:
    rows = [
        (way, human_bytes(f["peak_bytes"]), human_bytes(f["held_bytes"]), f["ms_per_token"] or None)
        for way, f in figures.items()
    ]
    note = (
        f"a checkpoint of {human_bytes(size)}; {PROMPT_TOKENS} tokens of prompt and {NEW_TOKENS} generated, one "
        "thread; the page cache, which the kernel may take back, is not counted"
    )
    return Sheet("Peak resident memory", ("way", "peak", "experts held", "ms/token, prompt included"), rows, note)


def _child(kind: str | None, folder: Path) -> dict[str, float]:
    printed = _python("-m", "tools.peak_memory", "--measure", kind or "imports", "--folder", str(folder))
    return json.loads(printed.splitlines()[-1])


def _python(*arguments: str) -> str:
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, *arguments], cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to make the checkpoint")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
