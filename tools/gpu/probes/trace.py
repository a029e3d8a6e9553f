"""Eight decoded tokens under torch's profiler: what the host calls a token (launches, graphs,
copies, waits), at a quarter of the experts and with all of them, as CUDA graphs and launched one by
one.

python -m tools.gpu.probes.trace
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from runtime.model.open import MoeModel
from runtime.session.session import Session, Settings
from runtime.session.settings import DEVICE
from tools.gpu.groups import tell
from tools.gpu.probes.options import parsed
from tools.gpu.probes.small_model import settings_of, small_olmoe

TOKENS = 8
PROMPT = 64
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


def main() -> None:
    options = parsed(__doc__)
    with small_olmoe(options, layers=4, length=PROMPT + 2 * TOKENS) as (opened, ids):
        plain = settings_of(options.device)
        runs = {
            "25%": replace(plain, preset="mixtral-offloading"),
            "100%": replace(plain, preset="full"),
        }
        if options.device != "cpu":
            runs["25%, the GPU decides"] = replace(plain, decide=DEVICE)
        for name, settings in runs.items():
            for singly in (False, True) if options.device != "cpu" else (True,):
                how = "launched one by one" if singly else "as graphs"
                counted = _counted(opened, ids, settings, singly=singly)
                tell(name=f"a token at {name}, {how}", layers=opened.shape.num_layers, **counted)


def _counted(
    opened: MoeModel, text: np.ndarray, settings: Settings, *, singly: bool
) -> dict[str, object]:
    ids = torch.from_numpy(text)[None]
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
