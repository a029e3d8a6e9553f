"""Split experts (MoEpic): every layer's budget, cache size and split ratio, solved."""

from artifacts.splits.solve import allocate, expert_split

__all__ = ["allocate", "expert_split"]
