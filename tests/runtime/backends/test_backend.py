"""Which compiled code suits a model, and how the one for a CPU orders a token's experts and
weights."""

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from artifacts.common import outside
from artifacts.errors import Incompatible
from artifacts.formats.fp8 import Scaled
from runtime.backends import choose
from runtime.backends.backend import Backend
from runtime.backends.choose import choose_backend
from runtime.backends.cpu import cpu_backend, forms_cpu
from runtime.backends.cpu.cpu_backend import CpuBackend
from runtime.backends.torch_backend import TorchBackend
from runtime.backends.triton.triton_backend import TritonBackend
from runtime.control.plan import NO_SLOT, Place
from runtime.kernels.cpu.dense import MOST_TOKENS
from runtime.model.layout import ExpertLayout, Layout, Part
from tests.runtime.backends.test_torch_backend import tokens

E = 6
K = 3
H = 4


@pytest.mark.parametrize(
    ("suit", "num_devices", "chosen"),
    [
        ((CpuBackend,), 1, CpuBackend),
        ((TritonBackend,), 1, TritonBackend),
        ((CpuBackend,), 2, CpuBackend),
        ((TritonBackend,), 2, None),
        ((TritonBackend,), 0, None),
        ((), 1, None),
    ],
)
def test_a_gpus_kernels_are_for_one_device(
    monkeypatch: pytest.MonkeyPatch, suit: tuple[type, ...], num_devices: int, chosen: type | None
) -> None:
    for kind in (choose.CpuBackend, choose.TritonBackend):
        monkeypatch.setattr(
            kind, "suits", staticmethod(lambda opened, kind=kind, **_: kind in suit)
        )
    assert choose_backend(object(), num_devices=num_devices) is chosen
    if num_devices == 1:
        assert choose_backend(object()) is chosen


class Kernels:
    """Kernels that add the number of the expert to its row, once for each call."""

    def __init__(self, opened: object, resident: object, threads: object) -> None:
        self.calls: list[tuple] = []

    def take(self, hidden: torch.Tensor, tokens: list[int] | None = None) -> None:
        self.token = hidden

    def starts(self, places: Sequence[Place]) -> list[int]:
        return [place.slot * 10 for place in places]

    def add(
        self, places: Sequence[Place], starts: Sequence[int], rows: Sequence[int], y: np.ndarray
    ) -> None:
        self.calls.append((list(starts), list(rows)))
        for place, row in zip(places, rows, strict=True):
            y[row] += place.key % E


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> CpuBackend:
    monkeypatch.setattr(cpu_backend, "TokenKernels", Kernels)
    shape = SimpleNamespace(num_experts=E, top_k=K)
    opened = SimpleNamespace(
        shape=shape,
        dtype=torch.float32,
        sum_dtype=torch.float32,
        layers=[SimpleNamespace(hidden_size=H)],
    )
    made = CpuBackend(opened, SimpleNamespace(num_experts=E), object())
    made._y += 99  # of an earlier token
    return made


HIDDEN = torch.ones(1, H)


class Outside(Backend):
    """A backend of another package."""

    @staticmethod
    def suits(opened: object, *, has_replicas: bool = False) -> bool:
        return opened == "theirs"


def test_a_registered_backend_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_registered", [])
    for kind in (choose.CpuBackend, choose.TritonBackend):
        monkeypatch.setattr(kind, "suits", staticmethod(lambda opened, **_: True))
    assert choose_backend("theirs") is CpuBackend
    assert choose.register_backend(Outside) is Outside
    assert choose_backend("theirs", num_devices=2) is Outside
    assert choose_backend("another") is CpuBackend


@pytest.mark.parametrize("breaks", [False, True])
def test_a_backend_is_found_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    module = "nowhere" if breaks else __name__
    point = EntryPoint("theirs", f"{module}:Outside", choose._GROUP)
    if not breaks:
        monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Outside=Outside))
    monkeypatch.setattr(outside, "entry_points", lambda group: [point][: group == choose._GROUP])
    outside.installed.cache_clear()
    try:
        if breaks:
            with pytest.raises(
                Incompatible, match="backend theirs cannot be imported from nowhere:Outside"
            ):
                choose_backend("theirs")
        else:
            assert choose_backend("theirs") is Outside
    finally:
        outside.installed.cache_clear()


def test_rows_are_by_ascending_expert_without_what_is_left_out(made: CpuBackend) -> None:
    made.begin(tokens(HIDDEN, np.array([[5, -1, 0]]), torch.tensor([[0.5, 9.0, 0.25]])))
    made.add([Place(E + 5, 2), Place(E, 1)])
    assert made._kernels.calls == [([20, 10], [1, 0])] and made._kernels.token is HIDDEN
    assert made.finish().tolist() == [[2.5] * H]


@pytest.mark.parametrize(
    ("are_in_ram", "calls"),
    [
        (True, [([40, 1000 + E + 3, 1000 + E + 1], [1, 2, 0])]),
        (False, [([40], [1]), ([1000 + E + 3], [2]), ([1000 + E + 1], [0])]),
    ],
    ids=["in RAM: one call", "on disk: one by one, through a buffer"],
)
def test_near_experts_come_after_what_is_ready_and_lie_where_the_near_tier_has_them(
    made: CpuBackend, are_in_ram: bool, calls: list[tuple]
) -> None:
    made.begin(tokens(HIDDEN, np.array([[3, 1, 2]]), torch.tensor([[1.0, 2.0, 4.0]])))

    def content(place: Place) -> SimpleNamespace:
        return SimpleNamespace(data_ptr=lambda: 1000 + place.key)

    near = SimpleNamespace(
        content=content,
        contents_in_ram=lambda places: list(map(content, places)) if are_in_ram else None,
    )
    made.add_near([Place(E + 3, NO_SLOT), Place(E + 1, NO_SLOT)], near, [Place(E + 2, 4)])
    assert made._kernels.calls == calls
    assert made.finish().tolist() == [[3.0 + 2.0 + 8.0] * H]


def test_many_tokens_are_computed_by_torch(made: CpuBackend) -> None:
    many = MOST_TOKENS + 1
    several = tokens(torch.ones(many, H), np.array([[0, 1]] * many), torch.ones(many, 2))
    made._of_several._resident.slots = SimpleNamespace(are_apart=False)
    under_way = made.begin(several)
    assert isinstance(under_way, TorchBackend) and under_way is not made
    made.clear()
    assert under_way._hidden is None, "nothing stays of a step that was broken off"


def test_a_whole_token_is_one_call_in_ascending_order(made: CpuBackend) -> None:
    places = [Place(E + 5, 0), Place(E + 1, 1), Place(E + 2, 2)]
    weights = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.bfloat16)
    out = made.forward(None, HIDDEN, [5, 1, 2], places, weights)
    assert made._kernels.calls == [([10, 20, 0], [0, 1, 2])]
    assert out.tolist() == [[5.0 + 2.0 + 8.0] * H]


PLAIN = ExpertLayout((), torch.float32)


def suited(
    monkeypatch: pytest.MonkeyPatch,
    *,
    plain: Sequence[bool],
    dtype: torch.dtype,
    device: str,
    layout: Layout = PLAIN,
) -> bool:
    monkeypatch.setattr(forms_cpu, "is_plain", lambda experts: experts)
    monkeypatch.setattr(forms_cpu, "gate_of", lambda experts: None)
    layers = [SimpleNamespace(experts=each) for each in plain]
    model = SimpleNamespace(device=torch.device(device))
    store = SimpleNamespace(layout=layout)
    return CpuBackend.suits(SimpleNamespace(layers=layers, dtype=dtype, model=model, store=store))


def test_experts_of_a_known_kind_and_type_on_a_cpu_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert suited(monkeypatch, plain=[True], dtype=torch.bfloat16, device="cpu")
    assert not suited(monkeypatch, plain=[False, True], dtype=torch.float32, device="cpu")
    assert not suited(monkeypatch, plain=[True], dtype=torch.float64, device="cpu")
    assert not suited(monkeypatch, plain=[True], dtype=torch.float32, device="meta")
    assert not suited(monkeypatch, plain=[True], dtype=torch.float32, device="cuda")
    down = Part("down_proj", torch.int8, (2, 2), 0, "weight", 0, Scaled())
    for parts, suits in (([down], True), ([down, Part("up_proj", torch.float16, (2, 2))], False)):
        as_published = ExpertLayout.stored(parts, torch.float32)
        assert (
            suited(
                monkeypatch, plain=[True], dtype=torch.float32, device="cpu", layout=as_published
            )
            == suits
        )


def test_timed_experts_multiply_one_token_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple] = []

    class Form:
        def multiply(self, places: tuple, starts: list[int], operands: tuple) -> None:
            x, rows, y, like = operands
            calls.append((places, starts, x.shape, rows.tolist(), y.shape, like.dtype))

    monkeypatch.setattr(cpu_backend, "form_of", lambda *_: Form())
    layer = SimpleNamespace(hidden_size=H, experts=None)
    opened = SimpleNamespace(
        store=SimpleNamespace(layout=None),
        dtype=torch.float32,
        layers=[layer],
        activations=None,
    )
    contents = [SimpleNamespace(data_ptr=lambda start=start: start) for start in (10, 20)]
    work = CpuBackend.timed_experts(opened, contents)
    for _ in range(2):
        work()
    assert calls == [((), [10, 20], (H,), [0, 1], (2, H), np.float32)] * 2
