"""Checks of runs below full precision: they equal the plain model with the same weights."""

from pathlib import Path

import numpy as np
import torch

from tools.gpu.checks.exactness import COMPUTED_ELSEWHERE, listen
from tools.gpu.checks.sessions import Finding

FEW_BITS = {
    "3 bits, resident": {
        "preset": "uniform-bits",
        "policies": {"residency": "shadow:bits=3,slots=no"},
        "budget": "60%",
    },
    "1 bit, over the link": {"policies": {"miss": "fetch_lowest"}, "budget": "{layers}x"},
    "2 bits, resident, fused": {
        "preset": "uniform-bits",
        "policies": {"residency": "shadow:bits=2,slots=no"},
        "budget": "60%",
        "experts": "fused",
    },
    "1.25 bits in trellis codes, resident, fused": {
        "preset": "uniform-bits",
        "policies": {"residency": "shadow:bits=1.25,slots=no"},
        "budget": "60%",
        "experts": "fused",
    },
}


def few_bits(folder: Path, scratch: Path, device: str, run: str) -> Finding:
    """Logits and greedy tokens in float32, the experts of the plain model unpacked from the same
    replicas."""
    from runtime.model.open import open_model
    from runtime.policies.base import Artefacts
    from runtime.session.session import Session, Settings
    from tools.bench.decoding.resident import plain_model
    from tools.gpu.checks.made_replicas import made, put

    opened = open_model(str(folder), dtype=torch.float32, device=device)
    scratch.mkdir(exist_ok=True)
    bits = float(run.split()[0])
    is_coded = "trellis" in run
    replicas = made(opened, scratch, is_coded=is_coded)
    chosen = FEW_BITS[run]
    settings = Settings(
        **chosen | {"budget": chosen["budget"].format(layers=opened.shape.num_layers)}
    )
    with Session(opened, settings, artefacts=Artefacts(replicas=replicas)) as session:
        ours = listen(opened.model, opened.config.vocab_size)
        kernel = session.receipt()["replicas"]["kernel"]
    plain = plain_model(folder, dtype=torch.float32, device=device)
    put(plain, opened, replicas, np.full(opened.shape.num_keys, bits))
    theirs = listen(plain, plain.config.vocab_size)
    opened.store.close()
    pairs = zip(ours.logits, theirs.logits, strict=True)
    relative = max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)
    is_same = ours.tokens == theirs.tokens
    detail = (
        f"largest difference {relative:.1e} of the largest logit; tokens "
        f"{'equal' if is_same else 'DIFFER'}; {kernel}"
    )
    return (
        relative <= COMPUTED_ELSEWHERE and is_same,
        detail,
        {"relative": relative, "tokens_equal": is_same},
    )
