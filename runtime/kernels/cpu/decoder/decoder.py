"""Compiled code for the parts of a decoder beside experts, for one token: linear layers, norms,
attention, blocks of layers, routers. All but linear layers are replaced only where compiled code
agrees with them."""

from collections.abc import Iterator
from contextlib import contextmanager

from runtime.kernels.cpu.decoder.compiled_attention import (
    CompiledAttention,
    compiled_attentions,
    compiled_blocks,
)
from runtime.kernels.cpu.decoder.compiled_body import CompiledBody, compiled_bodies
from runtime.kernels.cpu.decoder.compiled_layers import CompiledLayers, ExpertsInPlace
from runtime.kernels.cpu.decoder.compiled_norm import NUMBA, CompiledNorm
from runtime.kernels.cpu.decoder.compiled_router import compiled_router
from runtime.kernels.cpu.decoder.quiet_torch import QuietTorch
from runtime.kernels.cpu.dense import CompiledLinear
from runtime.kernels.cpu.threads import KernelThreads
from runtime.kernels.decoder.attention import told
from runtime.kernels.decoder.forwards import Forwards
from runtime.kernels.decoder.norms import recognise_norm
from runtime.model.open import MoeModel


class CompiledDecoder:
    """Replacement of `forward` in the modules that compiled code computes, from `install` to
    `uninstall`. Torch, which computes the rest, meanwhile has one thread for one token."""

    def __init__(self, opened: MoeModel, threads: KernelThreads) -> None:
        self._torch = QuietTorch(opened.model)
        self._linear = CompiledLinear(opened, threads)
        self._attentions = compiled_attentions(opened)
        norms = {
            module: recognise_norm(module, opened.dtype, NUMBA) for module in opened.model.modules()
        }
        blocks = compiled_blocks(opened, self._attentions, norms)
        self._linear.round_to(opened.activations)  # what is tried before must equal the modules
        self._blocks = {
            module: block
            for module, block in blocks.items()
            if self._linear.are_whole(block.linear)
        }
        self._norms = {
            module: CompiledNorm(module, norm, opened.dtype)
            for module, norm in norms.items()
            if norm
        }
        attentions = {
            module: each
            for module, each in self._attentions.items()
            if isinstance(each, CompiledAttention)
        }
        routers = {layer.gate: compiled_router(layer.gate) for layer in opened.layers}
        self._routers = {gate: router for gate, router in routers.items() if router}
        self._bodies = compiled_bodies(opened, norms)
        self._layers = [
            layers for body in self._bodies.values() if (layers := self._whole(opened, body))
        ]
        replaced = self._norms | attentions | self._blocks | self._routers | self._bodies
        self._forwards = Forwards(replaced)

    def _whole(self, opened: MoeModel, body: CompiledBody) -> CompiledLayers | None:
        """Return all layers of this body in one call, which the body then uses, or None if that is
        impossible."""
        blocks = [block for layer in body.parts.layers if (block := self._blocks.get(layer))]
        body.layers = CompiledLayers.of(opened.layers, blocks, self._routers)
        return body.layers

    def install(self, experts: ExpertsInPlace | None = None) -> None:
        """Replace modules; `experts` says when all layers can be one call."""
        for layers in self._layers:
            layers.experts = experts
        self._torch.install()
        self._linear.install()
        self._forwards.install()

    @contextmanager
    def all_layers(self, experts: ExpertsInPlace) -> Iterator[None]:
        """Compute all layers in one call with these experts, installed or not."""
        held = [layers.experts for layers in self._layers]
        added = [module for module in self._bodies if "forward" not in vars(module)]
        for layers in self._layers:
            layers.experts = experts
        for module in added:
            module.forward = self._bodies[module].forward
        try:
            yield
        finally:
            for layers, own in zip(self._layers, held, strict=True):
                layers.experts = own
            for module in added:
                del module.forward

    def uninstall(self) -> None:
        self._torch.uninstall()
        self._linear.uninstall()
        self._forwards.uninstall()

    def receipt(self) -> dict[str, object]:
        """Return how many modules are compiled, and, by class, why attentions are not."""
        return {
            "norms": len(self._norms),
            **told(self._attentions),
            "blocks": len(self._blocks),
            "bodies": len(self._bodies),
            "routers": len(self._routers),
            "whole": len(self._layers),
            "unclear_choices": sum(router.num_unclear for router in self._routers.values()),
        }
