"""What a decoder computes for one token beside experts and routers, in compiled code: linear layers, norms, attention.
A norm or an attention is replaced only where compiled code agrees with it."""

from collections import Counter
from collections.abc import Callable

from torch import nn

from runtime.kernels.cpu.attention_trial import compiled_attentions
from runtime.kernels.cpu.compiled_attention import CompiledAttention
from runtime.kernels.cpu.compiled_norm import CompiledNorm, recognise_norm
from runtime.kernels.cpu.dense import CompiledLinear
from runtime.kernels.cpu.quiet_torch import QuietTorch
from runtime.kernels.cpu.threads import KernelThreads
from runtime.model.open import MoeModel


class CompiledDecoder:
    """Replaces `forward` in the modules that compiled code computes, from `install` to `uninstall`; torch, which
    computes the rest, has one thread meanwhile for one token."""

    def __init__(self, opened: MoeModel, threads: KernelThreads) -> None:
        self._torch = QuietTorch(opened.model)
        self._linear, self._attentions = CompiledLinear(opened, threads), compiled_attentions(opened)
        norms = {module: recognise_norm(module, opened.dtype) for module in opened.model.modules()}
        self._forwards: dict[nn.Module, Callable] = {
            module: CompiledNorm(module, norm, opened.dtype).forward for module, norm in norms.items() if norm
        }
        self._num_norms = len(self._forwards)
        for module, attention in self._attentions.items():
            if isinstance(attention, CompiledAttention):
                self._forwards[module] = attention.forward

    def install(self) -> None:
        self._torch.install()
        self._linear.install()
        for module, forward in self._forwards.items():
            module.forward = forward

    def uninstall(self) -> None:
        self._torch.uninstall()
        self._linear.uninstall()
        for module in self._forwards:
            module.__dict__.pop("forward", None)

    def receipt(self) -> dict[str, object]:
        """How many modules are compiled, and why attentions are not, by class."""
        left = Counter(
            f"{type(module).__name__}: {reason}"
            for module, reason in self._attentions.items()
            if isinstance(reason, str)
        )
        num_attentions = len(self._attentions) - left.total()
        return {"norms": self._num_norms, "attentions": num_attentions, "attentions_left": dict(left)}
