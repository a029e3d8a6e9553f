"""Mutants of a source file, one small change each, and whether its tests kill them.

The changes are cosmic-ray's (the extra `mutation`), except operators whose mutants cannot but fail,
such as a division that becomes a shift. A mutant is never written: a child process, forked when all
that is not ours is imported, imports it in place of the file. Compiled loops run as plain Python,
so that they are mutated like any other code.
"""

import ast
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import hypothesis
import pytest

from tools import ROOT

OURS = ("artifacts", "runtime", "profilers", "moectl", "tests", "tools")
_THEIRS = ("numpy", "numba", "pyarrow.parquet", "hypothesis.strategies")
_OF_MODELS = (
    "transformers.models.olmoe.modeling_olmoe",
    "transformers.convert_slow_tokenizer",
    "tabulate",
)
_WITHOUT_MODELS = (
    "artifacts/",
    "runtime/policies/",
)  # tests of these files need not wait for the import of torch
_MOST_BYTES = 8 << 30
_WAITS = 3  # times as long as it computes at most: a mutant may wait for a thread for ever

_BINARY = (
    "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_Add Pow_Mul BitOr_BitAnd BitAnd_BitOr "
    "LShift_RShift RShift_LShift"
)
_COMPARISON = (
    "Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Eq_NotEq Eq_LtE Eq_GtE NotEq_Eq "
    "NotEq_Lt NotEq_Gt Is_IsNot IsNot_Is"
)
_OTHERS = (
    "ReplaceUnaryOperator_Delete_USub ReplaceUnaryOperator_Delete_Invert "
    "ReplaceUnaryOperator_Delete_Not AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue "
    "ReplaceAndWithOr ReplaceOrWithAnd ReplaceBreakWithContinue ReplaceContinueWithBreak "
    "NumberReplacer RemoveDecorator ZeroIterationForLoop"
)
OPERATORS = (
    *(f"ReplaceBinaryOperator_{pair}" for pair in _BINARY.split()),
    *(f"ReplaceComparisonOperator_{pair}" for pair in _COMPARISON.split()),
    *_OTHERS.split(),
)
_COMPILERS = ("part", "exact_part", "kernel")  # decorators without effect where nothing is compiled


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mutated file, relative to the root: the line, the `change` in readable form, and the whole
    source."""

    path: str
    line: int
    change: str
    source: str


def mutants(path: str) -> Iterator[Mutant]:
    """Yield every mutant of the file, except in annotations and other spans left out, in the order
    of the operators."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = (ROOT / path).read_text(encoding="utf-8")
    spans = list(_spans_left_out(source))
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        for number, (start, _) in enumerate(_positions(operator, source)):
            if not any(first <= start < last for first, last in spans):
                changed = mutate_code(source, operator, number)
                yield Mutant(path, start[0], _change(source, changed, name), changed)


def seconds_of(name: str, tests: Sequence[str]) -> float:
    """CPU seconds of the tests without a mutant. Raises RuntimeError if they fail."""
    code, seconds = _in_a_child(None, name, tests, limit_s=3600)
    if code:
        raise RuntimeError(
            f"the tests of {name} fail, or find nothing, before anything is changed: "
            f"{' '.join(tests)}"
        )
    return seconds


def is_killed(mutant: Mutant, tests: Sequence[str], *, limit_s: int) -> bool:
    """Return whether a test fails, takes more CPU seconds than the limit, or three times as many
    seconds of the clock."""
    return _in_a_child(mutant, mutant.path, tests, limit_s=limit_s)[0] != 0


def _prepare(path: str) -> None:
    """Import the third-party packages that tests of this file need, once, in the environment that
    children inherit."""
    os.environ |= {
        "NUMBA_DISABLE_JIT": "1",  # a compiled cache would hide the mutant
        "OMP_NUM_THREADS": "1",
        # the search for plugins takes longer than most tests
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    for name in _THEIRS if path.startswith(_WITHOUT_MODELS) else (*_THEIRS, *_OF_MODELS):
        importlib.import_module(name)
    assert importlib.import_module("numba").config.DISABLE_JIT, (
        "numba was imported before, and compiles"
    )
    gc.freeze()


def _in_a_child(
    mutant: Mutant | None, path: str, tests: Sequence[str], *, limit_s: int
) -> tuple[int, float]:
    """Exit status and CPU seconds of a child process."""
    _prepare(path)
    child = os.fork()
    if not child:
        try:
            status = _test(mutant, path, tests, limit_s)
        except BaseException:
            status = 1
        os._exit(status)
    _, status, used = os.wait4(child, 0)
    return status, used.ru_utime + used.ru_stime


def _test(mutant: Mutant | None, path: str, tests: Sequence[str], limit_s: int) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    signal.alarm(_WAITS * limit_s)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    os.chdir(ROOT)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    if mutant is not None:
        sys.meta_path.insert(0, _Finder(path.removesuffix(".py").replace("/", "."), mutant))
    # The same examples every time, without shrinking: only the failure counts.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, phases=phases
    )
    hypothesis.settings.load_profile("mutants")
    quick = (
        "--assert=plain",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:unraisableexception",
        "--import-mode=importlib",
    )
    # One file after another: if the first fails, the others need not be imported.
    by_file = groupby(tests, key=lambda test: test.partition("::")[0])
    return int(any(pytest.main(["-x", "-q", *quick, *some]) for _, some in by_file))


class _Finder(importlib.abc.MetaPathFinder):
    """Imports the mutant in place of its module."""

    def __init__(self, name: str, mutant: Mutant) -> None:
        self._name = name
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_loader(fullname, _Loader(fullname, self._mutant))


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, mutant: Mutant) -> None:
        super().__init__(name, str(ROOT / mutant.path))
        self._source = mutant.source

    def get_code(self, fullname: str) -> object:
        return compile(self._source, self.path, "exec", dont_inherit=True)


def _positions(operator: object, source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Positions at which cosmic-ray's operator would change something, in its order."""
    from cosmic_ray.ast import Visitor, get_ast

    found = []

    class Positions(Visitor):
        def visit(self, node: object) -> object:
            found.extend(operator.mutation_positions(node))
            return node

    Positions().walk(get_ast(source))
    return found


def _spans_left_out(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Spans of (line, column) that are not mutated: annotations, compiling decorators, and the star
    of keyword-only arguments."""
    for number, line in enumerate(source.splitlines(), start=1):
        yield from (
            ((number, star.start()), (number, star.end())) for star in re.finditer(r"\*(?=,)", line)
        )
    for node in ast.walk(ast.parse(source)):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.FunctionDef):
            parts += [each for each in node.decorator_list if _name_of(each) in _COMPILERS]
        for part in filter(None, parts):
            # A decorator's span begins at its @.
            yield (part.lineno, part.col_offset - 1), (part.end_lineno, part.end_col_offset)


def _name_of(decorator: ast.expr) -> str:
    return ast.unparse(decorator).partition("(")[0]


def _change(source: str, changed: str, operator: str) -> str:
    """`before` -> `after`, with as much of the line as needed."""
    before = source.splitlines()
    after = changed.splitlines()
    if len(before) != len(after):
        return operator
    old, new = next(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
    start = len(os.path.commonprefix([old, new]))
    end = min(len(os.path.commonprefix([old[::-1], new[::-1]])), len(old) - start, len(new) - start)
    first = max(0, start - 18)
    return " -> ".join(
        " ".join(line[first : len(line) - max(0, end - 18)].split()) for line in (old, new)
    )
