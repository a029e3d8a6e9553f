"""One expert on a few tokens by compiled code and by torch, as `--experts fused` may compute it on
a CPU.

    OMP_NUM_THREADS=1 python -m tools.bench.kernels.several_tokens --only bfloat16

Both take turns in rounds, so that what else the machine does falls on both alike; times are of the
processor, the least of all rounds. Experts are cold: there are as many copies as no cache holds,
which take turns.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from moectl.show.render import Sheet, show_sheet
from runtime.backends.cpu.forms_cpu import form_of
from runtime.control.plan import NO_SLOT, Place
from runtime.kernels.load import AS_NUMPY
from runtime.model.arithmetic import expert_forward
from runtime.model.layout import ExpertLayout
from runtime.model.quantised.quantised_matrix import project_in_tiles
from tools.arguments import parser_of
from tools.bench.kernels.stored_matrices import cold_copies, plain_expert, random_expert, variants
from tools.bench.measuring import least_ratio

Expert = tuple[ExpertLayout, torch.Tensor]  # with its content
COLD_NBYTES = 96 << 20
PLAIN = (torch.bfloat16, torch.float16, torch.float32)
GROUP = 128
_PLACE = Place(0, NO_SLOT)


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    hidden, neurons = options.shape
    names = [name for name in (*map(_name, PLAIN), *variants(GROUP)) if options.only in name]
    measured = {
        name: ratios(
            *expert(name, hidden, neurons), (hidden, neurons), options.tokens, rounds=options.rounds
        )
        for name in names
    }
    show_sheet(sheet(measured, (hidden, neurons), rounds=options.rounds))


def expert(name: str, hidden: int, neurons: int) -> Expert:
    """A random expert: plain if the name is a dtype's, or in a published format."""
    for dtype in PLAIN:
        if name == _name(dtype):
            return plain_expert(hidden, neurons, dtype)
    return random_expert(variants(GROUP)[name], hidden, neurons, torch.bfloat16)


def ratios(
    layout: ExpertLayout,
    content: torch.Tensor,
    shape: tuple[int, int],
    counts: Sequence[int],
    *,
    rounds: int,
) -> dict[int, float]:
    """The least time of compiled code by torch's least, for each number of tokens; the first round
    warms up."""
    copies = cold_copies(layout, content, COLD_NBYTES)
    found = {}
    for count in counts:
        x = torch.randn(count, shape[0], dtype=layout.dtype)
        found[count] = least_ratio(*_both(layout, copies, x, shape), rounds)
    return found


def _both(
    layout: ExpertLayout,
    copies: torch.Tensor,
    x: torch.Tensor,
    shape: tuple[int, int],
) -> tuple[Callable[[int], torch.Tensor], Callable[[int], torch.Tensor]]:
    """Functions that compute another copy at each turn, and never one that the other has just
    read."""
    form = form_of(layout, layout.dtype)
    module = experts_module(*shape)
    views = [layout.views(each) for each in copies]
    like = np.empty(0, _kind(layout.dtype))

    def ours(turn: int) -> torch.Tensor:
        return form.forward(_PLACE, copies[2 * turn % len(copies)].data_ptr(), x, like)

    def torchs(turn: int) -> torch.Tensor:
        return expert_forward(
            module, views[(2 * turn + 1) % len(copies)], x, project=project_in_tiles
        )

    return ours, torchs


def experts_module(hidden: int, neurons: int) -> nn.Module:
    """A module of gated experts with SiLU, without weights."""
    config = OlmoeConfig(hidden_size=hidden, intermediate_size=neurons, num_experts=1)
    with torch.device("meta"):
        return OlmoeExperts(config)


def _kind(dtype: torch.dtype) -> str:
    return _name(AS_NUMPY[dtype])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sheet(
    measured: Mapping[str, Mapping[int, float]], shape: tuple[int, int], *, rounds: int
) -> Sheet:
    counts = list(next(iter(measured.values())))
    rows = [
        (name, *(f"{found[count]:.2f}" for count in counts)) for name, found in measured.items()
    ]
    note = (
        f"one cold expert, hidden {shape[0]}, intermediate {shape[1]}; processor time, least of "
        f"{rounds} rounds"
    )
    return Sheet("Compiled code by torch, by tokens", ("format", *map(str, counts)), rows, note)


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        rounds=31,
        only=("", "formats whose name contains this"),
        tokens=[1, 2, 3, 4, 6, 8, 12, 16, 32],
    )
    parser.add_argument(
        "--shape", type=int, nargs=2, default=(2048, 1024), help="hidden and intermediate size"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
