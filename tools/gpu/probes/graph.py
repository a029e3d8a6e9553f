"""Probe of capturing a wholly resident layer's experts in a CUDA graph: the work of the host in it
must not depend on the token.

python -m tools.gpu.probes.graph
"""

from functools import partial

import torch

from runtime.session.session import Session
from tools.gpu.groups import tell
from tools.gpu.probes.options import parsed
from tools.gpu.probes.small_model import settings_of, small_olmoe
from tools.gpu.timing import microseconds


@torch.inference_mode()
def main() -> None:
    options = parsed(__doc__)
    device = options.device
    with (
        small_olmoe(options, layers=2, length=64) as (opened, ids),
        Session(opened, settings_of(device, "full")) as session,
    ):
        session.forward(torch.from_numpy(ids)[None])
        top_k = opened.shape.top_k
        hidden = torch.randn(1, opened.config.hidden_size, dtype=opened.dtype, device=device)
        chosen = torch.arange(top_k, device=device)[None]
        weights = torch.full((1, top_k), 0.5, dtype=opened.dtype, device=device)
        run = partial(session.engine.steps.run, opened.layers[0], hidden, chosen, weights)
        expected = run()
        us = microseconds(lambda turn: run(), 1, 100, device)
        is_same = torch.equal(expected, run())
    tell(name="a resident layer's experts", us=us, passed=is_same, captured=device != "cpu")


if __name__ == "__main__":
    main()
