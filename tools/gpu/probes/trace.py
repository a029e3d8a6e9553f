"""Eight decoded tokens under torch's profiler: what the host calls a token (launches, graphs,
copies, waits), at a quarter of the experts and with all of them, as CUDA graphs and launched one by
one.

python -m tools.gpu.probes.trace
"""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings
from runtime.session.settings import DEVICE
from tools.gpu import models
from tools.gpu.groups import tell
from tools.gpu.packages import experts_by
from tools.gpu.probes.options import parsed

TOKENS = 8
PROMPT = 64
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


def main() -> None:
    options = parsed(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        shape = models.SHAPES["olmoe-1b-7b"]
        models.save(shape, Path(folder), layers=4, device=options.device, tiny=options.tiny)
        opened = open_model(folder, device=torch.device(options.device))
        link = "auto" if options.device != "cpu" else "1GB/s"
        plain = Settings("on-demand", budget="25%", experts=experts_by(options.device), link=link)
        runs = {
            "25%": replace(plain, preset="mixtral-offloading"),
            "100%": replace(plain, preset="full"),
        }
        if options.device != "cpu":
            runs["25%, the GPU decides"] = replace(plain, decide=DEVICE)
        for name, settings in runs.items():
            for singly in (False, True) if options.device != "cpu" else (True,):
                how = "launched one by one" if singly else "as graphs"
                counted = _counted(opened, settings, singly=singly)
                tell(name=f"a token at {name}, {how}", layers=opened.shape.num_layers, **counted)


def _counted(opened: MoeModel, settings: Settings, *, singly: bool) -> dict[str, object]:
    (ids,) = models.texts(opened.config.vocab_size, count=1, length=PROMPT + 2 * TOKENS)
    ids = torch.from_numpy(ids)[None]
    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if opened.model.device.type == "cuda" else []
    with Session(opened, settings) as session:
        if singly and session.engine.captured:
            session.engine.captured.stop()
        past = session.forward(ids[:, :PROMPT]).past_key_values
        # what is compiled or allocated once is not counted
        for position in range(PROMPT, PROMPT + TOKENS):
            past = session.forward(ids[:, position : position + 1], past=past).past_key_values
        with profile(activities=kinds) as profiled:
            for position in range(PROMPT + TOKENS, PROMPT + 2 * TOKENS):
                past = session.forward(ids[:, position : position + 1], past=past).past_key_values
    calls = Counter(event.name for event in profiled.events())
    return {
        "graphs": calls["cudaGraphLaunch"] / TOKENS,
        "launches": sum(calls[name] for name in _LAUNCHES) / TOKENS,
        "copies": calls["cudaMemcpyAsync"] / TOKENS,
        "waits": sum(calls[name] for name in _WAITS) / TOKENS,
        "torch_operations": sum(count for name, count in calls.items() if name.startswith("aten::"))
        / TOKENS,
    }


if __name__ == "__main__":
    main()
