"""Probe of capturing a wholly resident layer's experts in a CUDA graph: the work of the host in it
must not depend on the token.

python -m tools.gpu.probes.graph
"""

import tempfile
from functools import partial
from pathlib import Path

import torch

from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from tools.gpu import models
from tools.gpu.groups import tell
from tools.gpu.packages import experts_by
from tools.gpu.probes.options import parsed
from tools.gpu.timing import microseconds


@torch.inference_mode()
def main() -> None:
    options = parsed(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        models.save(
            models.SHAPES["olmoe-1b-7b"],
            Path(folder),
            layers=2,
            device=options.device,
            tiny=options.tiny,
        )
        opened = open_model(folder, device=torch.device(options.device))
        link = "auto" if options.device != "cpu" else "1GB/s"
        with Session(
            opened, Settings("full", experts=experts_by(options.device), link=link)
        ) as session:
            session.forward(torch.arange(3, 67)[None])
            layer = opened.layers[0]
            shape = opened.shape
            hidden = torch.randn(
                1, opened.config.hidden_size, dtype=opened.dtype, device=options.device
            )
            ids = torch.arange(shape.top_k, device=options.device)[None]
            weights = torch.full((1, shape.top_k), 0.5, dtype=opened.dtype, device=options.device)
            run = partial(session.engine.steps.run, layer, hidden, ids, weights)
            expected = run()
            us = microseconds(lambda turn: run(), 1, 100, options.device)
            is_same = torch.equal(expected, run())
        opened.store.close()
    tell(name="a resident layer's experts", us=us, passed=is_same, captured=options.device != "cpu")


if __name__ == "__main__":
    main()
