"""Warm-up of a GPU at the end of opening: kernels are compiled, and loaded by the driver, when they
are first used, which the first prompt would wait for."""

from functools import partial

import torch

from runtime.backends.backend import StepTokens
from runtime.control.plan import Place
from runtime.devices import compiles_late, made_current, wait_for_compute
from runtime.session.parts import Parts

_NUM_TOKENS = (128, 1)  # of a prompt, for which kernels have other tiles than for one token


def warm_up(parts: Parts) -> None:
    """Run a prompt and a token through the model, before the engine is installed. The first layer
    computes what happens to lie in the slots, and all layers' experts give zeros: nothing is
    loaded, decided or counted. Does nothing on a CPU."""
    opened = parts.opened
    device = opened.model.device
    if not compiles_late(device):
        return
    config = opened.model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", _NUM_TOKENS[0])
    vocabulary = opened.model.get_input_embeddings().num_embeddings
    modules = [layer.experts for layer in opened.layers]
    if parts.dense:
        parts.dense.install()
    for module in modules:
        module.forward = _zeros
    if slots := _usable(parts):
        modules[0].forward = partial(_compute, parts, slots)
    try:
        with torch.inference_mode(), made_current(device):
            for count in _NUM_TOKENS:
                ids = torch.arange(min(count, most), device=device) % vocabulary
                opened.model(input_ids=ids[None], use_cache=True)
            wait_for_compute(device)
    finally:
        for module in modules:
            del module.forward
        if parts.dense:
            parts.dense.uninstall()


def _usable(parts: Parts) -> list[int]:
    """Return the slots with room for a whole expert. None are usable where experts are cut or lie
    on several devices, or where a format has indices, which may lead anywhere in what is no
    expert."""
    layout = parts.opened.store.layout
    if parts.fast.split or parts.slots.are_apart or not layout.is_plain:
        return []
    return [slot for slot in range(len(parts.slots)) if len(parts.slots[slot]) >= layout.nbytes]


def _zeros(hidden: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(hidden)


def _compute(
    parts: Parts,
    slots: list[int],
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Compute the experts `ids` [T, K] of the first layer as if they lay in these slots."""
    experts = ids.cpu().numpy()
    tokens = StepTokens(
        parts.opened.layers[0].experts,
        hidden,
        experts=experts,
        ids=ids,
        router_weights=weights,
        host_weights=weights.float().cpu().numpy(),
        are_planned=False,
        are_routed=True,
    )
    backend = parts.engine.steps.backend.begin(tokens)
    keys = sorted({*experts.ravel().tolist()})
    backend.add([Place(key, slots[key % len(slots)]) for key in keys])
    backend.finish()
    return torch.zeros_like(hidden)
