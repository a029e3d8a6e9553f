"""torch on one thread while a model computes one token, or a few, beside compiled code."""

import torch
from torch import nn

from runtime.kernels.cpu.dense import MOST_TOKENS


class QuietTorch:
    """Limit of torch to one thread while a model computes a few tokens, from `install` to
    `uninstall`.

    Only routers and other small products are left to torch, which gain nothing by threads. OpenMP's
    threads would spin for more than 10 ms after each product, longer than until the next one, on
    cores that compiled code and the link need.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles = []
        self._num_threads = 0  # to go back to; 0 outside such a pass

    def install(self) -> None:
        self._handles += [
            self._model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._model.register_forward_hook(self._end, always_call=True),
        ]

    def uninstall(self) -> None:
        self._end()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, model: nn.Module, args: tuple, named: dict) -> None:
        self._end()  # of a pass that was interrupted: hooks are called after errors only
        ids = named.get("input_ids", args[0] if args else None)
        if ids is not None and ids.numel() <= MOST_TOKENS:
            self._num_threads = torch.get_num_threads()
            torch.set_num_threads(1)

    def _end(self, *_: object) -> None:
        if self._num_threads:
            torch.set_num_threads(self._num_threads)
            self._num_threads = 0
