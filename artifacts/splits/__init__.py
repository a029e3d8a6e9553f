"""MoEpic's budget, cache size and cut of every layer, solved."""

from artifacts.splits.solve import allocate, expert_split

__all__ = ["allocate", "expert_split"]
