"""Experts of every form give the same bits on any number of threads."""

from collections.abc import Iterator
from functools import cache
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Gemma4TextConfig, MixtralConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from artifacts.quantisation.packing import PARTS
from artifacts.shape import FULL_BITS
from runtime.backends.cpu.forms_cpu import TokenKernels
from runtime.control.plan import Place
from runtime.kernels.cpu import threads as module
from runtime.kernels.cpu.threads import KernelThreads
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.layout import ExpertLayout, Layout
from runtime.tiers.replica_layouts import ReplicaLayout, replica_part
from runtime.tiers.slow import SlowTier
from tools.bench.kernels.stored_matrices import random_expert, variants
from tools.gpu.checks.low_bit import random_packed

HIDDEN = 512
NEURONS = 256
NUM = 5
Expert = tuple[Layout | ReplicaLayout, torch.Tensor]


def whole(seed: int, dtype: torch.dtype = torch.bfloat16) -> Expert:
    layout = ExpertLayout.of({GATE_UP: (2 * NEURONS, HIDDEN), DOWN: (HIDDEN, NEURONS)}, dtype)
    torch.manual_seed(seed)
    weights = torch.randn(layout.nbytes // dtype.itemsize) / 16
    return layout, weights.to(dtype).view(torch.uint8)


def packed(seed: int, bits: int) -> Expert:
    tensors = {
        f"{name}.{part}": tensor
        for name, sizes in ((GATE_UP, (2 * NEURONS, HIDDEN)), (DOWN, (HIDDEN, NEURONS)))
        for part in PARTS
        if (tensor := getattr(random_packed(*sizes, bits, 32, seed=seed), part)) is not None
    }
    parts = []
    offset = 0
    for name, tensor in tensors.items():
        parts.append(replica_part(name, tensor.dtype, tuple(tensor.shape), offset))
        offset += tensor.nbytes
    content = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()])
    return ReplicaLayout(bits, tuple(parts), {GATE_UP: HIDDEN, DOWN: NEURONS}), content


def published(seed: int, name: str) -> Expert:
    torch.manual_seed(seed)
    return random_expert(variants(32)[name], HIDDEN, NEURONS, torch.bfloat16)


FORMS = {
    **{
        f"whole, {name}": [(FULL_BITS, whole(seed, getattr(torch, name))) for seed in range(NUM)]
        for name in ("bfloat16", "float16", "float32")
    },
    "packed": [(3, packed(seed, 3)) for seed in range(NUM)],
    **{
        name: [(FULL_BITS, published(seed, name)) for seed in range(NUM)]
        for name in (
            "MXFP4",
            "FP8, blocks",
            "FP8, one scale",
            "compressed-tensors, 4 bits, asymmetric",
            "GGUF, Q8_0",
            "GGUF, Q4_K",
            "GGUF, IQ3_S",
            "GGUF, Q2_0",
            "AWQ",
        )
    },
    "whole and packed": [
        (FULL_BITS, whole(0)),
        (4, packed(1, 4)),
        (1, packed(2, 1)),
        (FULL_BITS, whole(3)),
    ],
}
GELU = ("whole, bfloat16", "GGUF, Q8_0")
FORMS |= {f"{form}, GELU": FORMS[form] for form in GELU}
BY_EXPERTS = {"packed", "AWQ"}


@pytest.fixture(params=[2, 3, 5, 16])
def threads(request: pytest.FixtureRequest) -> Iterator[KernelThreads]:
    threads = KernelThreads(request.param)
    yield threads
    threads.close()


def kernels_of(form: str, threads: KernelThreads) -> TokenKernels:
    experts = FORMS[form]
    stores = {bits: SimpleNamespace(layout=layout) for bits, (layout, _) in experts}
    slots = [content for _, (_, content) in experts]
    resident = SimpleNamespace(slow=SlowTier(stores), shadows=None, slots=slots)
    layout = experts[0][1][0]
    dtype = layout.dtype if isinstance(layout, ExpertLayout) else torch.bfloat16
    layer = SimpleNamespace(
        hidden_size=HIDDEN, experts=experts_with("GELU" if form.endswith("GELU") else "SiLU")
    )
    kernels = TokenKernels(
        SimpleNamespace(dtype=dtype, layers=[layer], activations=None), resident, threads
    )
    kernels.take(torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype))
    return kernels


@cache
def experts_with(activation: str) -> nn.Module:
    """A module of experts, whose gate counts."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1}
    if activation == "SiLU":
        return MixtralExperts(MixtralConfig(**sizes, intermediate_size=8, num_local_experts=1))
    return Gemma4TextExperts(Gemma4TextConfig(**sizes, moe_intermediate_size=8, num_experts=1))


def outputs(form: str, threads: KernelThreads) -> np.ndarray:
    """Rows [n + 1, HIDDEN]; the third expert adds to the row of the first, as a segment would."""
    kernels = kernels_of(form, threads)
    experts = FORMS[form]
    places = [Place(key, key, bits) for key, (bits, _) in enumerate(experts)]
    y = np.zeros((len(places) + 1, HIDDEN), np.float32)
    rows = [4, 1, 4, *range(3, len(places))]
    kernels.add(places, kernels.starts(places), rows, y)
    return y


@pytest.mark.parametrize("form", FORMS)
def test_any_number_of_threads_gives_the_same_bits(
    form: str, threads: KernelThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_ROWS", 1 << 40)
    alone = outputs(form, KernelThreads(1))
    assert np.abs(alone).max() > 0 and np.isfinite(alone).all()
    assert (outputs(form, threads) == alone).all() and threads.num_used == 1, (
        "too little to be divided"
    )
    monkeypatch.setattr(module, "MIN_SHARE", 1)
    monkeypatch.setattr(module, "MIN_ROWS", 1)
    assert (outputs(form, threads) == alone).all()
    # where matrices cannot be divided, threads take the three rows of y that experts add to
    assert threads.num_used == (min(threads.count, 3) if form in BY_EXPERTS else threads.count)


def test_jobs_that_follow_each_other_do_not_mix(
    threads: KernelThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of changing experts at once after each other, while threads come late, sleep, are woken
    and run parts in Python."""
    monkeypatch.setattr(module, "MIN_ROWS", 1)
    alone = kernels_of("whole, bfloat16", KernelThreads(1))
    shared = kernels_of("whole, bfloat16", threads)
    random = Random(0)
    for _ in range(200):
        chosen = random.sample(range(NUM), random.randint(1, NUM))
        places = [Place(key, key, FULL_BITS) for key in chosen]
        results = []
        for kernels in (alone, shared):
            y = np.zeros((len(chosen), HIDDEN), np.float32)
            kernels.add(places, kernels.starts(places), range(len(chosen)), y)
            results.append(y)
        assert (results[0] == results[1]).all()
        if random.random() < 0.1:
            threads.wake()
        if random.random() < 0.1:
            threads.run([lambda: None] * random.randint(1, threads.count))
