"""Experts of the near tier, computed on the host while a GPU computes those of its slots."""

from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np
import torch
from torch import nn

from runtime.backends.cpu.forms_cpu import TokenKernels, has_form
from runtime.backends.host_copy import HostTokens
from runtime.control.plan import Place
from runtime.kernels.cpu.dense import MOST_TOKENS
from runtime.kernels.cpu.threads import KernelThreads, divided
from runtime.kernels.load import AS_NUMPY, has_numba
from runtime.model.arithmetic import Assigned, assign, gather
from runtime.model.open import MoeModel
from runtime.tiers.fast import ResidentExperts
from runtime.tiers.near import NearTier

_HOST = torch.device("cpu")


class NearExperts:
    """Computes near experts on a step's tokens: call `begin`, queue the work that the device does
    meanwhile, then call `outputs`.

    The CPU's kernels compute the experts that they support, on few tokens, with numba; torch
    computes the others.
    """

    def __init__(self, opened: MoeModel, resident: ResidentExperts, threads: KernelThreads) -> None:
        self._opened = opened
        self._resident = resident
        self._threads = threads
        self._num_experts = resident.num_experts
        self._tokens = HostTokens(resident.slots.device)

    def begin(self, hidden: torch.Tensor) -> None:
        """Begin to copy tokens [T, H] to the host, before the device is given more to do."""
        self._tokens.fetch(hidden)
        self.wake()

    def wake(self) -> None:
        """Let threads get ready to compute."""
        if self._kernels:
            self._threads.wake()

    def outputs(
        self, module: nn.Module, places: Sequence[Place], near: NearTier, experts: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the experts at `places`, where tokens go to `experts` [T, K]. Returns pairs [n],
        numbered T * K, and their outputs [n, H], both on the device. The outputs of two segments of
        an expert are added up."""
        tokens = self._tokens.there()
        assigned = assign(experts, _HOST)
        found: dict[int, torch.Tensor] = {}
        for place, y in zip(
            places, self._computed(module, places, near, tokens, assigned), strict=True
        ):
            expert = place.key % self._num_experts
            found[expert] = found[expert].float() + y.float() if expert in found else y
        pairs = [_pairs(assigned[expert], experts.shape[1]) for expert in found]
        outputs = [y.expand(len(own), -1) for own, y in zip(pairs, found.values(), strict=True)]
        return self._tokens.bring(np.concatenate(pairs), torch.cat(outputs))

    def of_few(
        self,
        module: nn.Module,
        places: Sequence[Place],
        near: NearTier,
        tokens: torch.Tensor,
        experts: np.ndarray,
    ) -> torch.Tensor:
        """Return the outputs [n, H] of the experts at `places`, expert by expert and within one by
        rank and token, on a few tokens [T, H] in the host's memory that go to `experts` [T, K]."""
        if len(tokens) == 1 and (outputs := self._of_one(places, near, tokens)) is not None:
            return outputs
        assigned = assign(experts, _HOST)
        return torch.cat(self._computed(module, places, near, tokens, assigned))

    @cached_property
    def _kernels(self) -> TokenKernels | None:
        """The CPU's kernels, if they support these experts, else None; made on first access, as
        some import numba."""
        opened = self._opened
        resident = self._resident
        has_replicas = resident.shadows is not None or len(resident.slow.stores) > 1
        if not has_numba() or opened.dtype not in AS_NUMPY:
            return None
        if not has_form(opened.layers[0].experts, opened.store.layout, has_replicas=has_replicas):
            return None
        return TokenKernels(opened, resident, self._threads)

    def _computed(
        self,
        module: nn.Module,
        places: Sequence[Place],
        near: NearTier,
        tokens: torch.Tensor,
        assigned: dict[int, Assigned],
    ) -> list[torch.Tensor]:
        """Return the output [t, H] of each of `places` on its tokens of `tokens` [T, H]."""
        if len(tokens) == 1 and (outputs := self._of_one(places, near, tokens)) is not None:
            return list(outputs[:, None].unbind())
        if 1 < len(tokens) <= MOST_TOKENS:
            numbers = [assigned[place.key % self._num_experts].tokens.tolist() for place in places]
            if (outputs := self._of_several(places, near, tokens, numbers)) is not None:
                return outputs
        xs = [gather(tokens, assigned[place.key % self._num_experts]) for place in places]
        outputs = self._by_kernels(places, near, xs)
        for i, (place, x) in enumerate(zip(places, xs, strict=True)):
            if i not in outputs:
                outputs[i] = self._one(module, place, near, x)
        return [outputs[i] for i in range(len(places))]

    def _of_one(
        self, places: Sequence[Place], near: NearTier, token: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the outputs [n, H] of a token's experts, if kernels compute all where they lie in
        RAM."""
        contents = near.contents_in_ram(places) if self._kernels else None
        if not contents:
            return None
        starts = [content.data_ptr() for content in contents]
        return self._kernels.outputs(token, places, starts).view(len(places), -1)

    def _of_several(
        self,
        places: Sequence[Place],
        near: NearTier,
        tokens: torch.Tensor,
        numbers: Sequence[list[int]],
    ) -> list[torch.Tensor] | None:
        """Return the output [t, H] of each of `places` on its tokens `numbers` of a few [T, H], if
        kernels compute all where they lie in RAM: threads share the rows of an expert, and its
        weights are read once for all tokens."""
        contents = near.contents_in_ram(places) if self._kernels else None
        if not contents:
            return None
        counts = [*map(len, numbers)]
        whose = np.repeat(np.arange(len(places)), counts).tolist()
        y = np.zeros((len(whose), tokens.shape[1]), np.float32)
        self._kernels.take(tokens, [token for own in numbers for token in own])
        starts = [contents[i].data_ptr() for i in whose]
        self._kernels.add([places[i] for i in whose], starts, range(len(whose)), y)
        return list(torch.from_numpy(y).to(tokens.dtype).split(counts))

    def _by_kernels(
        self, places: Sequence[Place], near: NearTier, xs: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Return the outputs of those of `places` that kernels compute where they lie in RAM. Each
        thread takes whole experts."""
        if not self._kernels or not (contents := near.contents_in_ram(places)):
            return {}
        own = [i for i, place in enumerate(places) if self._kernels.takes(place, len(xs[i]))]
        outputs: dict[int, torch.Tensor] = {}

        def compute(share: Sequence[int]) -> None:
            for i in share:
                outputs[own[i]] = self._kernels.forward(
                    places[own[i]], contents[own[i]].data_ptr(), xs[own[i]]
                )

        sizes = [len(contents[i]) for i in own]
        shares = divided(sizes, self._threads.num_shares(sum(sizes)))
        self._threads.run([partial(compute, share) for share in shares])
        return outputs

    def _one(
        self, module: nn.Module, place: Place, near: NearTier, x: torch.Tensor
    ) -> torch.Tensor:
        if self._kernels and self._kernels.takes(place, len(x)):
            return self._kernels.forward(place, near.content(place).data_ptr(), x)
        return near.forward(module, place, x)


def _pairs(assigned: Assigned, top_k: int) -> np.ndarray:
    """Return the numbers of an expert's pairs, int64 [t]."""
    if assigned.tokens is None:
        return np.array([assigned.ranks])
    return assigned.tokens.numpy() * top_k + assigned.ranks.numpy()
