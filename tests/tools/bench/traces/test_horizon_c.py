"""The C header of horizon decides as the policy does: no difference in any step or victim."""

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest

from artifacts.shape import Shape
from artifacts.traces.trace import DECODE, PREFILL
from runtime.policies.base import Artefacts, Now, Step
from runtime.policies.presets import Scope
from tools.bench.traces.horizon_c import HEADER, Both, compiled
from tools.bench.traces.real import TRACES, Prepared, _path

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler named cc")
PASSES = (
    (PREFILL, 1),
    (PREFILL, 1100),  # longer than the memory
    *[(DECODE, 1)] * 9,
    (PREFILL, 7),
    *[(DECODE, 3)] * 4,
    *[(DECODE, 1)] * 9,
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("horizon"))


def agree(library: ctypes.CDLL, name: str, tokens: int) -> Both:
    real = next(real for real in TRACES if real.name == name)
    both = Both(library)
    Prepared.of_file(real, _path(real, None), tokens).replayed(
        {}, Scope.GLOBAL, 0.25, eviction=both
    )
    assert (both.other_steps, both.other_victims) == (0, 0)
    return both


@pytest.mark.parametrize("name", ["gpt-oss-20b", "bundled-model"])
def test_every_victim_of_a_replay_is_the_same(library: ctypes.CDLL, name: str) -> None:
    assert agree(library, name, 60).victims > 100


@pytest.mark.slow
def test_and_over_the_whole_bundled_trace(library: ctypes.CDLL) -> None:
    assert agree(library, "gpt-oss-20b", 3000).victims > 30_000


def test_prompts_batches_and_dropped_ranks_are_learnt_alike(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    shape = Shape(num_layers=3, num_experts=9, top_k=2, expert_nbytes=1)
    both = Both(library)
    both.prepare(shape, Artefacts())
    now = Now()
    for phase, tokens in PASSES:
        now.pass_index += 1
        for layer in range(shape.num_layers):
            now.step += 1
            ids = np.argsort(rng.random((tokens, 9)) * np.arange(1, 10))[:, :2]
            ids[rng.random(ids.shape) < 0.1] = -1
            keys = [layer * 9 + one for one in dict.fromkeys(ids.ravel().tolist()) if one >= 0]
            step = Step(now.pass_index, phase, layer, ids, np.ones(ids.shape, np.float32))
            both.used(keys, step, now)
    assert both.steps == len(PASSES) * 3
    assert both.other_steps == 0


def test_the_header_is_short_and_holds_no_floating_point() -> None:
    text = Path(HEADER).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 300
    assert not {"float", "double", "math.h"} & set(text.replace("<", " ").replace(">", " ").split())
