"""The C header of horizon against the policy: every victim of a replay, and microseconds a step.

    python -m tools.bench.traces.horizon_c
    python -m tools.bench.traces.horizon_c --traces FOLDER --tokens 100000

Compiles `runtime/policies/shared/horizon.h` with the system's compiler. Each trace is replayed with
global scope at 25 %, loading on demand; at every eviction both name a victim, and after every step
what they expect of each expert is compared. Times are CPU times: the header's over whole passes of
one token in C, the policy's of its own calls in Python.
"""

import ctypes
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from artifacts.errors import Problem
from artifacts.shape import Shape
from artifacts.traces.trace import Trace
from moectl.show.render import Sheet, show_sheet
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.eviction.horizon import Horizon
from runtime.policies.presets import Scope
from runtime.policies.shared import block
from tools.bench.traces.real import Prepared, options, present

HEADER = Path(block.__file__).with_name("horizon.h")
_GRAIN = 16
_EXPORTED = """
#include "horizon.h"
size_t size(void) { return sizeof(horizon); }
size_t init(horizon *h, void *block, int l, int e, int k) { return horizon_init(h, block, l, e, k); }
void begin(horizon *h, int tokens, int decodes) { horizon_begin(h, tokens, decodes); }
void used(horizon *h, int layer, int64_t step, const int32_t *ids, int tokens) {
    horizon_used(h, layer, step, ids, tokens);
}
int victim(const horizon *h, const int32_t *keys, int n) { return horizon_victim(h, keys, n); }
const int64_t *expected(const horizon *h) { return h->expected; }
void run(horizon *h, const int32_t *ids, int passes) {
    int64_t step = 0;
    for (int pass = 0; pass < passes; pass++) {
        horizon_begin(h, 1, 1);
        for (size_t layer = 0; layer < h->layers; layer++, step++, ids += h->top_k)
            horizon_used(h, (int)layer, step, ids, 1);
    }
}
"""


def compiled(folder: Path) -> ctypes.CDLL:
    """Compile the header into a library in a folder. Raises Problem without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise Problem("there is no C compiler named cc on the path: install one")
    source = folder / "horizon.c"
    source.write_text(_EXPORTED, encoding="utf-8")
    library = source.with_suffix(".so")
    strict = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-Wno-missing-prototypes", "-pedantic")
    order = [compiler, *strict, "-O3", "-shared", "-fPIC", f"-I{HEADER.parent}", str(source)]
    subprocess.run([*order, "-o", str(library)], check=True)
    found = ctypes.CDLL(str(library))
    found.size.restype = found.init.restype = ctypes.c_size_t
    found.expected.restype = ctypes.POINTER(ctypes.c_int64)
    found.used.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int,
    ]
    return found


class InC:
    """A `horizon` of the header."""

    def __init__(self, library: ctypes.CDLL, shape: Shape) -> None:
        self.library = library
        sizes = shape.num_layers, shape.num_experts, shape.top_k
        self._block = np.zeros(library.init(None, None, *sizes) // 8 + 1, np.int64)
        self._own = np.zeros(library.size() // 8 + 1, np.int64)
        self.own = ctypes.c_void_p(self._own.ctypes.data)
        library.init(self.own, ctypes.c_void_p(self._block.ctypes.data), *sizes)
        self.expected = np.ctypeslib.as_array(library.expected(self.own), (shape.num_keys,))

    def victim(self, keys: np.ndarray) -> int:
        """Return the key that goes first."""
        keys = np.ascontiguousarray(keys, np.int32)
        return int(
            keys[self.library.victim(self.own, keys.ctypes.data_as(ctypes.c_void_p), len(keys))]
        )


class Both(SimpleEviction):
    """Evicts as `horizon` does, and counts where the header decides otherwise."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.steps = self.victims = self.other_steps = self.other_victims = 0
        self.spent_s = 0.0

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self.policy = Horizon()
        self.policy.prepare(shape, artefacts)
        self.in_c = InC(self._library, shape)
        self._pass_index = -1

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        begin_s = time.thread_time()
        self.policy.used(keys, step, now)
        self.spent_s += time.thread_time() - begin_s
        ids = np.ascontiguousarray(step.selected, np.int32)
        if now.pass_index != self._pass_index:
            self._pass_index = now.pass_index
            self._library.begin(self.in_c.own, len(ids), step.decodes)
        self._library.used(self.in_c.own, step.layer, now.step, ids.ctypes.data, len(ids))
        self.steps += 1
        nearness = self.policy.ranks[0]
        expected = np.where(np.isinf(nearness), np.inf, -_GRAIN * nearness)
        told = np.where(self.in_c.expected == 2**63 - 1, np.inf, self.in_c.expected)
        self.other_steps += not np.array_equal(expected, told)

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        column = self.policy.order(keys, now)[0]
        self.victims += 1
        self.other_victims += int(keys[column.argmin()]) != self.in_c.victim(keys)
        return (column,)


def microseconds(library: ctypes.CDLL, trace: Trace, shape: Shape) -> float:
    """Return the CPU time of a step in C, over the trace's tokens one after another."""
    order = np.lexsort((trace.layer, trace.token, trace.request))
    ids = np.ascontiguousarray(trace.experts[order], np.int32)
    passes = len(ids) // shape.num_layers
    in_c = InC(library, shape)
    begin_s = time.thread_time()
    library.run(in_c.own, ids.ctypes.data_as(ctypes.c_void_p), passes)
    return (time.thread_time() - begin_s) / (passes * shape.num_layers) * 1e6


def main() -> None:
    chosen = options(__doc__).parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(Path(folder))
        for real, path in present(chosen):
            prepared = Prepared.of_file(real, path, chosen.tokens)
            both = Both(library)
            prepared.replayed({}, Scope.GLOBAL, 0.25, eviction=both)
            in_c_us = microseconds(library, prepared.trace, prepared.shape)
            counts = both.steps, both.other_steps, both.victims, both.other_victims
            policy_us = both.spent_s / both.steps * 1e6
            rows.append((real.name, *map(str, counts), f"{in_c_us:.1f}", f"{policy_us:.1f}"))
    columns = "trace", "steps", "differ", "evictions", "differ", "us a step, C", "us a step, Python"
    show_sheet(Sheet("horizon.h and the policy horizon", columns, rows, ""))


if __name__ == "__main__":
    main()
