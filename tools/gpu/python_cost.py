"""Microseconds of Python that a decoded token's experts take of the host in each layer, by who
decides, without a GPU.

    python -m tools.gpu.python_cost
    python -m tools.gpu.python_cost --road "device decides" --profile

A very small model with 64 experts, 8 selected, that a stand-in for a GPU serves: Triton compiles
the kernels for compute capability 9.0 and launches them by its own code, up to the driver, which
does nothing; streams and events do nothing. From the call of a layer's experts to its return: CPU
time of the thread, without attention, norms and routers. A driver's own time for a launch, a copy
or an event is not in it. Experts are drawn at random; where they are not all resident, the budget
has room for .7 of them. And the whole forward of a token that is replayed as CUDA graphs, which
send letters and do nothing else, with attention, norms and routers in them.
"""

import argparse
import cProfile
import pstats
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from moectl.show.render import Sheet, show_sheet
from runtime.model.open import MoeModel, open_model
from runtime.session import build
from runtime.session.session import Session, Settings
from runtime.session.settings import DEVICE, FUSED
from tools.arguments import parser_of
from tools.bench.traces.controller import quartiles
from tools.gpu import models
from tools.gpu.faked import counted_gpu
from tools.gpu.faked.null_driver import NullDriver, NullGraph

SHAPE = replace(models.SHAPES["olmoe-1b-7b"], tiny={"num_experts": 64, "num_experts_per_tok": 8})
DEEP = replace(SHAPE, tiny=SHAPE.tiny | {"num_hidden_layers": 16})
_PLAIN = Settings(budget="70%", link="1GB/s", experts=FUSED)
ROADS = {
    "host decides, on demand": _PLAIN,
    "host decides, next gate": replace(_PLAIN, policies={"prefetch": "next_gate"}),
    "device decides": replace(_PLAIN, decide=DEVICE),
    "device decides, next gate": replace(_PLAIN, decide=DEVICE, policies={"prefetch": "next_gate"}),
    "device decides, late horizon": replace(
        _PLAIN, decide=DEVICE, policies={"eviction": "late_horizon"}
    ),
    "all resident": replace(_PLAIN, preset="full"),
}


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    counted_gpu.install()
    build.TritonDecoder = lambda opened: None  # nothing is computed: a trial would refuse all
    driver = NullDriver(capability=90)
    rows = []
    whole = []
    driver.activate()
    NullGraph.activate()
    with tempfile.TemporaryDirectory() as folder:
        shallow = Path(folder) / "shallow"
        deep = Path(folder) / "deep"
        models.save(SHAPE, shallow, layers=1, device="cpu", tiny=True)
        models.save(DEEP, deep, layers=1, device="cpu", tiny=True)
        for road in options.road:
            opened = open_model(str(shallow))
            found = measured(
                opened, ROADS[road], driver, tokens=options.tokens, profiles=options.profile
            )
            opened.store.close()
            rows.append((road, *quartiles(found.us), f"{found.launches:.2f}"))
            opened = open_model(str(deep))
            us = quartiles(replayed_us(opened, ROADS[road], driver, tokens=options.tokens))
            whole.append((road, *us, f"{float(us[1]) / opened.shape.num_layers:.0f}"))
            opened.store.close()
    columns = ("road", "us a layer, 1st quartile", "median", "3rd quartile", "launches")
    show_sheet(Sheet(f"Python of a layer's experts, {options.tokens} tokens", columns, rows, ""))
    columns = ("road", "us a token, 1st quartile", "median", "3rd quartile", "us a layer")
    title = (
        f"Python of a whole token as CUDA graphs, {options.tokens} tokens of "
        f"{opened.shape.num_layers} layers"
    )
    show_sheet(Sheet(title, columns, whole, ""))


@dataclass(slots=True)
class Python:
    """Microseconds of each layer's experts, and launches a layer."""

    us: list[float] = field(default_factory=list)
    launches: float = 0.0


def measured(
    opened: MoeModel, settings: Settings, driver: NullDriver, *, tokens: int, profiles: bool
) -> Python:
    """Decode `tokens` tokens, after a warm-up of a third of that number."""
    found = Python()
    profiler = cProfile.Profile() if profiles else None
    layers, warm = (opened.shape.num_layers, 0)
    with counted_gpu.with_mailbox(Session(opened, settings)) as session:
        session.engine.captured.stop()
        past = session.forward(torch.arange(3, 11)[None]).past_key_values
        for layer in opened.layers:
            _time(layer.experts, opened.shape.num_experts, found.us, driver, profiler)
        for turn in range(tokens + tokens // 3):
            if turn == tokens // 3:
                warm = driver.num_launches
                found.us.clear()
            past = session.forward(torch.tensor([[3 + turn % 64]]), past=past).past_key_values
    if profiler:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    found.launches = (driver.num_launches - warm) / (tokens * layers)
    return found


def replayed_us(
    opened: MoeModel, settings: Settings, driver: NullDriver, *, tokens: int
) -> list[float]:
    """Microseconds of each token's forward, replayed as graphs: with hooks, counters and the few
    operations before, between and behind them, by torch on a CPU. What routers say is drawn at
    random before each token."""
    us = []
    random = np.random.default_rng(0)
    num_experts = opened.shape.num_experts
    NullGraph.made.clear()
    with counted_gpu.with_mailbox(Session(opened, settings)) as session:
        for layer in opened.layers:
            layer.experts.moectl_forward = _silent(layer.experts.moectl_forward)
        past = session.forward(torch.arange(3, 11)[None]).past_key_values
        for turn in range(tokens + tokens // 3):
            for ids, values in NullGraph.letters():
                ids.copy_(torch.from_numpy(random.permutation(num_experts)[None, : ids.shape[1]]))
                values.uniform_()
            begin_s = time.thread_time()
            own_s = driver.own_s
            past = session.forward(torch.tensor([[3 + turn % 64]]), past=past).past_key_values
            us.append((time.thread_time() - begin_s - (driver.own_s - own_s)) * 1e6)
        assert session.receipt()["captured"]["tokens"] >= tokens, session.receipt()["captured"]
    return us[tokens // 3 :]


def _silent(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `run` with its result set to zero: numbers that no kernel has computed may be NaN."""
    return lambda *given: run(*given).zero_()


def _time(
    experts, count: int, us: list[float], driver: NullDriver, profiler: cProfile.Profile | None
) -> None:
    """Make a layer's experts note the time of each call, with experts at random; their outputs are
    not computed."""
    run = experts.moectl_forward
    random = np.random.default_rng(count)

    def timed(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if len(hidden) > 1:
            return torch.zeros_like(hidden)
        drawn = torch.from_numpy(random.permutation(count)[None, : ids.shape[1]])
        begin_s = time.thread_time()
        own_s = driver.own_s
        if profiler:
            profiler.enable()
        run(hidden, drawn, weights)
        if profiler:
            profiler.disable()
        us.append((time.thread_time() - begin_s - (driver.own_s - own_s)) * 1e6)
        return torch.zeros_like(hidden)

    experts.moectl_forward = timed


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, tokens=300, profile=(False, "say where the time goes, too"))
    parser.add_argument("--road", nargs="+", default=list(ROADS), choices=ROADS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
