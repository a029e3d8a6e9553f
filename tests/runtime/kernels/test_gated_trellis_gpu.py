"""A token's experts in trellis codes by the Triton kernels in triton's interpreter on a CPU."""

import json

from artifacts.quantisation.widths import TRELLIS_WIDTHS
from tests.helpers.triton_process import interpret, needs_triton

pytestmark = needs_triton
SIZES = (40, 24, 2, 4)  # hidden, neurons, ranks, experts
ALLOWED = {"float32": 1e-5, "float16": 3e-3}
EXPERTS = """
import json, sys
import torch
from artifacts.quantisation.widths import TRELLIS_WIDTHS
from runtime.kernels.gpu.addressing import RankNumbers
from tools.gpu.checks.packed import Replicas
sizes, dtypes = json.loads(sys.argv[1])
hidden, _, top_k, _ = sizes
random = torch.Generator().manual_seed(0)
for bits in TRELLIS_WIDTHS:
    case = Replicas(sizes, bits, turns=1, device="cpu", is_coded=True)
    for dtype in (getattr(torch, name) for name in dtypes):
        x = torch.randn(1, hidden, generator=random).to(dtype)
        theirs = case.unpacked(x.float())
        error = (case.together(x, 0) - theirs).norm() / theirs.norm()
        print(json.dumps([bits, str(dtype).removeprefix("torch."), error.item()]))
x, y = torch.randn(3, hidden, generator=random), torch.full((6, hidden), 7.0)
case._form.multiply(x, torch.tensor([[0, -1], [1, 0], [-1, -1]]), y)
theirs = torch.stack([case.unpacked(token[None]) for token in x])
pairs = [(y[0], theirs[0, 0]), (y[2], theirs[1, 1]), (y[3], theirs[1, 0]), *((y[i], y[i] * 0 + 7) for i in (1, 4, 5))]
print(json.dumps(max(((one - other).norm() / other.norm()).item() for one, other in pairs)))
"""


def test_outputs_of_every_width_are_those_of_the_unpacked_experts() -> None:
    """Of one token, and of several of which some have no expert."""
    *lines, of_several = [
        json.loads(line) for line in interpret(EXPERTS, json.dumps([SIZES, list(ALLOWED)]))
    ]
    assert [bits for bits, *_ in lines] == [bits for bits in TRELLIS_WIDTHS for _ in ALLOWED]
    for bits, dtype, error in lines:
        assert error < ALLOWED[dtype], (bits, dtype, error)
    assert of_several < ALLOWED["float32"]
