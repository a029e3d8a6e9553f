"""The choice of the backend that computes a model's experts.

Other packages add a backend by an entry point of the group `moectl.backends`, or by
`register_backend`; theirs are asked before moectl's own.
"""

from collections.abc import Iterator

from artifacts.common.outside import installed, load
from runtime.backends.backend import Backend
from runtime.backends.cpu.cpu_backend import CpuBackend
from runtime.backends.cpu.forms_cpu import TokenKernels
from runtime.backends.torch_backend import Batched, TorchBackend
from runtime.backends.triton.triton_backend import TritonBackend
from runtime.kernels.cpu.threads import KernelThreads
from runtime.model.open import MoeModel
from runtime.tiers.fast import ResidentExperts

_GROUP = "moectl.backends"
_registered: list[type[Backend]] = []


def register_backend(kind: type[Backend]) -> type[Backend]:
    """Let a backend compute the experts that it suits. Use it as a decorator of the class."""
    _registered.append(kind)
    return kind


def choose_backend(
    opened: MoeModel, *, num_devices: int = 1, has_replicas: bool = False
) -> type[Backend] | None:
    """Return the compiled backend for this model's experts on their device, whole or cut in two;
    None where only torch computes them."""
    for kind in _backends():
        can_spread = num_devices == 1 or not kind.is_for_one_device
        if can_spread and kind.suits(opened, has_replicas=has_replicas):
            return kind
    return None


def dequantised(kind: type[Backend], opened: MoeModel) -> str:
    """Return a line on the layers whose experts `kind` dequantises one at a time; empty where there
    are none."""
    layers = kind.dequantised_layers(opened)
    variants = dict.fromkeys(opened.variants[layer] for layer in layers)
    formats = ", ".join(opened.store.layout.variants[variant].format for variant in variants)
    if not layers:
        return ""
    return (
        f"experts of {len(layers)} of {opened.shape.num_layers} layers ({formats}) have no "
        "kernels: one at a time is dequantised"
    )


def open_backend(
    opened: MoeModel,
    resident: ResidentExperts,
    threads: KernelThreads,
    *,
    batched: Batched | None,
    is_fused: bool,
) -> Backend:
    """Return the backend of a session: compiled code if `is_fused`, else torch with the model's own
    bits, except for replicas of few bits, and several experts of a token in one call by
    `batched`."""
    chosen = choose_backend(opened) if is_fused else None
    if chosen is not None:
        return chosen(opened, resident, threads)
    has_kernels = CpuBackend.suits(opened, has_replicas=True)
    kernels = TokenKernels(opened, resident, threads) if has_kernels else None
    return TorchBackend(resident, batched, kernels, sum_dtype=opened.sum_dtype)


def _backends() -> Iterator[type[Backend]]:
    """Yield the backends in the order in which they are asked. Raises Incompatible where one of an
    installed package cannot be imported."""
    yield from _registered
    found: list[type[Backend]] = []
    for entry in installed(_GROUP).values():
        load(f"backend {entry.name}", entry, found.append)
    yield from (*found, CpuBackend, TritonBackend)
