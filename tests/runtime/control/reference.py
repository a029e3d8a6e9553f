"""A slow reference cache in plain Python: one layer step at a time, demand loads only."""

import numpy as np

from artifacts.shape import Shape


class SlowCache:
    """One eviction policy over all layers (`is_global`) or for each layer alone; counts what the
    controller should count."""

    def __init__(self, shape: Shape, capacity: int, is_global: bool, policy: str) -> None:
        self.shape = shape
        self.is_global = is_global
        self.policy = policy
        self.capacity = capacity if is_global else capacity // shape.num_layers
        self.resident: set[tuple[int, int]] = set()
        self.last_use: dict[tuple[int, int], int] = {}
        self.last_pass: dict[tuple[int, int], int] = {}
        self.evicted: set[tuple[int, int]] = set()
        self.counts = dict.fromkeys(("requests", "hits", "misses", "evictions", "collisions"), 0)
        self.uses: dict[tuple[int, int], int] = {}
        self.last_token: dict[tuple[int, int], int] = {}
        self.step_number = self.pass_number = self.num_tokens = self.layer = 0
        self.future: list[
            set[tuple[int, int]]
        ] = []  # for belady: what each step of the whole trace wants

    def begin_pass(self, num_tokens: int) -> None:
        self.pass_number += 1
        self.num_tokens += num_tokens
        self.evicted = set()

    def step(self, layer: int, selected: np.ndarray) -> None:
        self.step_number += 1
        self.layer = layer
        wanted = list(dict.fromkeys((layer, int(expert)) for expert in selected.ravel()))
        missing = [key for key in wanted if key not in self.resident]
        self.counts["requests"] += len(wanted)
        self.counts["hits"] += len(wanted) - len(missing)
        self.counts["misses"] += len(missing)
        self.counts["collisions"] += sum(key in self.evicted for key in missing)
        for key in wanted:
            self.last_use[key], self.last_pass[key] = self.step_number, self.pass_number
            self.uses[key], self.last_token[key] = self.uses.get(key, 0) + 1, self.num_tokens
        pinned = {key for key in wanted if key in self.resident}
        while missing:
            key = missing[0]
            if len(self.scope(layer)) == self.capacity:
                candidates = self.scope(layer) - pinned
                if not candidates:  # the wave is full: its computed experts make room
                    pinned = set()
                    continue
                victim = min(candidates, key=self.rank)
                self.resident.remove(victim)
                self.evicted.add(victim)
                self.counts["evictions"] += 1
            self.resident.add(key)
            pinned.add(missing.pop(0))

    def scope(self, layer: int) -> set[tuple[int, int]]:
        return {key for key in self.resident if self.is_global or key[0] == layer}

    def rank(self, key: tuple[int, int]) -> tuple:
        """Return the sort key of a victim, smallest first; ties go by the lower key."""
        layer = key[0]
        oldest = self.last_use[key]
        is_current = self.last_pass[key] == self.pass_number
        if self.policy == "lru":
            return oldest, key
        if self.policy == "lfu":
            return self.uses[key], key
        if self.policy == "lcp":
            return self.uses[key] * 0.25 ** ((self.num_tokens - self.last_token[key]) / 128), key
        if self.policy == "fld":
            return -((layer - self.layer) % self.shape.num_layers), oldest, key
        if self.policy == "fld:distance=absolute":
            return -abs(layer - self.layer), oldest, key
        if self.policy == "belady":
            later = range(self.step_number, len(self.future))  # this step was counted already
            return -next(
                (number for number in later if key in self.future[number]), len(self.future)
            ), key
        if self.policy == "least_stale:within=ascending":
            return is_current, layer, oldest, key
        is_right = layer > self.layer
        place = (
            is_right,
            -layer if is_right else layer,
        )  # what this pass has passed, then the farthest ahead
        first = (
            (is_right, is_current) if self.policy == "least_stale:within=left" else (is_current,)
        )
        return first, place, oldest, key
