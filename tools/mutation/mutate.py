"""Runs the tests of every mutant of the code that decides on experts, bits and memory, and reports
survivors.

    pip install -e '.[test,mutation]'
    python -m tools.mutation.mutate                                  all files of the table below: tens of minutes
    python -m tools.mutation.mutate runtime/policies/miss/buddy.py   these
    python -m tools.mutation.mutate --sample 40 runtime/links/link.py   40 of its mutants, drawn with a fixed seed
    python -m tools.mutation.mutate --write                          and put the tables into docs/lab/mutation.md

Prints tried, killed and what survived of every file. On the page each survivor has its reason,
which is kept when the page is written again; one that is new says that it has none, and is to be
looked at.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tools import ROOT
from tools.mutation.mutants import Mutant, is_killed, mutants, seconds_of

PAGE = ROOT / "docs" / "lab" / "mutation.md"
WANTED = 0.85
UNKNOWN = "**not looked at yet**"
_HERE = "<!-- written by tools/mutation/mutate.py -->\n"

_POLICIES = "tests/runtime/policies"
_MISSES = "tests/runtime/policies/test_misses.py"
_GOLDEN = "tests/runtime/control/test_golden.py::test_counts_are_the_golden_ones"
_TEXTS = (
    "tests/runtime/policies/test_table.py::test_a_policy_is_a_dataclass_whose_fields_have_defaults",
    "tests/runtime/policies/test_table.py::test_every_policy_has_its_paragraph_and_every_parameter_its_default",
)


def _policy(axis: str, name: str, *tests: str, rows: Sequence[str] = ("",)) -> tuple[str, ...]:
    """Tests of a policy: written ones, then those of the table, then golden counts."""
    texts = [f"{text}[{axis}-{name}]" for text in _TEXTS]
    return (*tests, *texts, *(f"{_GOLDEN}[{axis}/{name}{row}]" for row in rows))


_EVICTIONS = f"{_POLICIES}/test_evictions.py"
_HORIZON = tuple(
    f"{_POLICIES}/test_horizon.py::{name}"
    for name in (
        "test_compiled_and_plain_agree[2]",
        "test_compiled_and_plain_agree[0]",
        "test_what_followed_a_token_before_is_expected_after_it",
        "test_a_prompt_is_remembered_token_by_token",
        "test_a_prediction_moves_the_next_visit",
        "test_what_every_pass_uses_outlasts_what_none_does",
        "test_tokens_count_by_what_they_have_in_common_with_the_newest",
        "test_nothing_is_expected_later_than_a_wait_without_end_counts",
        "test_one_token_may_say_what_several_layers_ahead_use",
        "test_a_visit_stays_the_earliest_and_the_wait_the_latest_whatever_was_fitted",
        "test_what_was_said_of_a_visit_is_compared_with_it_once",
        "test_a_wait_below_a_pass_weighs_as_a_pass_does",
    )
)
_BUDDY_ROWS = (
    "",
    *(
        f":quota=0.2,stand_in={name}"
        for name in ("buddy", "random_resident", "best_resident", "zero")
    ),
)
_MODEL = "tests/runtime/model"
_DAMAGED = "tests/faults/test_11_checkpoint.py"
_OPENED = f"{_MODEL}/test_open.py::test_everything_equals_the_plain_model"
_SPLITS = "tests/artifacts/splits/test_solve.py"
_STAGES = "tests/artifacts/splits/test_kernels.py"
TESTS = {
    **{
        f"runtime/policies/eviction/{name}.py": _policy("eviction", name, _EVICTIONS)
        for name in (
            "belady",
            "class_lru",
            "fld",
            "lcp",
            "least_stale",
            "lfu",
            "lhu",
            "lru",
            "random",
            "score",
        )
    },
    "runtime/policies/eviction/shared.py": _policy("eviction", "lhu", _EVICTIONS),
    "runtime/policies/eviction/activation.py": _policy(
        "eviction", "activation", f"{_POLICIES}/test_activation.py"
    ),
    "runtime/policies/eviction/map.py": _policy(
        "eviction",
        "map",
        f"{_POLICIES}/test_maps.py",
        f"{_EVICTIONS}::test_a_policy_that_needs_more_than_uses_says_so",
    ),
    "runtime/policies/eviction/horizon.py": _HORIZON,
    "runtime/policies/shared/horizon_kernels.py": _HORIZON,
    "runtime/policies/miss/buddy.py": _policy(
        "miss", "buddy", f"{_POLICIES}/test_buddy.py", rows=_BUDDY_ROWS
    ),
    "runtime/policies/miss/substitute.py": _policy("miss", "substitute", _MISSES),
    **{
        f"runtime/policies/miss/controls/{name}.py": _policy("miss", name, _MISSES)
        for name in ("best_resident", "random_resident", "zero")
    },
    **{
        f"runtime/policies/miss/{name}.py": _policy(
            "miss", name, f"{_POLICIES}/test_other_engines.py"
        )
        for name in ("share", "hybrid")
    },
    "runtime/policies/shared/misses.py": (_MISSES,),
    "runtime/session/session.py": ("tests/runtime/session/test_requests.py",),
    "runtime/session/parts.py": ("tests/runtime/session/test_observers.py",),
    **{
        f"runtime/engine/{name}.py": (f"tests/runtime/engine/test_{name}.py",)
        for name in ("engine", "step", "one_expert", "routers")
    },
    "runtime/backends/torch_backend.py": ("tests/runtime/backends/test_torch_backend.py",),
    **dict.fromkeys(
        ("runtime/backends/backend.py", "runtime/backends/cpu/cpu_backend.py"),
        ("tests/runtime/backends/test_backend.py",),
    ),
    **{
        f"runtime/session/{name}.py": (f"tests/runtime/session/test_{name}.py",)
        for name in ("probe", "receipt")
    },
    "runtime/session/learn_maps.py": tuple(
        f"tests/runtime/session/test_learn_maps.py::test_{name}"
        for name in (
            "the_next_run_begins_with_the_learned_maps",
            "of_two_runs_on_one_store_neither_is_lost",
            "a_full_store_of_maps_stays_as_large",
        )
    ),
    "runtime/links/link.py": (
        "tests/runtime/links/test_link.py",
        "tests/runtime/links/test_thread_link.py",
        "tests/runtime/links/test_disk_link.py",
    ),
    "runtime/links/emulated.py": ("tests/runtime/links/test_emulated.py",),
    "runtime/session/generation/sampling.py": ("tests/runtime/session/test_sampling.py",),
    "moectl/serving/scheduler.py": ("tests/moectl/serving/test_scheduler.py",),
    "artifacts/quantisation/bit_allocation.py": (
        "tests/artifacts/quantisation/test_bit_allocation.py",
    ),
    "artifacts/splits/solve.py": (
        *(
            f"{_SPLITS}::test_{name}"
            for name in (
                "what_makes_no_sense_is_refused",
                "what_is_just_possible",
                "latencies_as_the_solvers_take_them",
                "whom_a_split_fits",
                "transfers_take_nothing_besides_unless_said",
                "expert_split_by_hand",
                "each_transfer_has_its_latency",
                "sizes_that_were_found_expose_what_was_said",
            )
        ),
        _STAGES,
    ),
    "artifacts/splits/kernels.py": (
        _STAGES,
        *(
            f"{_SPLITS}::test_{name}"
            for name in (
                "expert_split_by_hand",
                "each_transfer_has_its_latency",
                "what_is_just_possible",
                "a_layer_may_end_with_all_of_its_experts",
                "seconds_may_be_of_any_size",
                "expert_split_is_the_plain_loops",
            )
        ),
    ),
    **{
        f"runtime/model/{name}.py": (f"{_MODEL}/test_{name.removeprefix('files/')}.py",)
        for name in ("layout", "arithmetic", "layers", "files/expert_store")
    },
    "runtime/model/files/expert_tensors.py": (
        f"{_MODEL}/test_expert_tensors.py",
        *(
            f"{_DAMAGED}::test_{what}"
            for what in ("missing_expert_tensor", "missing_experts_of_a_layer", "surplus_expert")
        ),
        *(
            f"{_OPENED}[{case}-float32]"
            for case in ("olmoe-fused", "olmoe-hub", "phimoe-hub", "gpt_oss-hub")
        ),
        f"{_MODEL}/test_quantised_tensor.py::test_an_expert_in_another_format_than_the_others_opens",
        *(
            f"{_MODEL}/test_quantised_tensor.py::test_logits_and_tokens_are_those_of_the_dequantised_model"
            f"[{pair}-on-demand]"
            for pair in ("fp8-deepseek_v2", "mxfp4-gpt_oss")
        ),
        *(
            f"{_MODEL}/test_families.py::test_experts_that_are_stored_otherwise_are_read_in_parts[{family}]"
            for family in ("qwen3_vl_moe", "inkling_text")
        ),
    ),
    "runtime/session/generation/single.py": ("tests/runtime/session/test_generation.py",),
    "moectl/serving/openai_api.py": ("tests/moectl/serving/test_openai_api.py",),
    "moectl/serving/guard.py": ("tests/moectl/serving/test_guard.py",),
}
"""The tests of each file, the quickest first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one file: the number of mutants that were tried, the survivors, and the number of
    all mutants."""

    path: str
    tried: int
    survivors: tuple[Mutant, ...]
    count: int

    @property
    def share_killed(self) -> float:
        return 1 - len(self.survivors) / self.tried if self.tried else 1.0

    @property
    def num_tried(self) -> str:
        """Number of mutants tried, as the page shows it: `8`, or `4 of 8` of a sample."""
        return f"{self.tried}" if self.tried == self.count else f"{self.tried} of {self.count}"


def outcome_of(path: str, tests: Sequence[str], *, sample: int | None = None) -> Outcome:
    """Try every mutant of a file, or a `sample` of them that is the same every time."""
    # Twice the usual time and some seconds for a busy machine; a mutant that takes longer counts as
    # an endless loop.
    limit_s = int(2 * seconds_of(path, tests) + 5)
    every = list(mutants(path))
    tried = (
        every if sample is None or sample >= len(every) else random.Random(0).sample(every, sample)
    )
    survivors = tuple(each for each in tried if not is_killed(each, tests, limit_s=limit_s))
    return Outcome(path, len(tried), survivors, len(every))


def reasons_on(page: str) -> dict[tuple[str, str], str]:
    """The reasons on the page for each survivor, by file and change."""
    rows = [
        [cell.strip() for cell in line.split(" | ")]
        for line in page.splitlines()
        if line.startswith("| `")
    ]
    return {(row[0].strip("|` "), row[2]): row[3].rstrip("| ") for row in rows if len(row) == 4}


def page_of(outcomes: Iterable[Outcome], page: str) -> str:
    """The page with the tables of these results and the reasons it had before."""
    outcomes = list(outcomes)
    reasons = reasons_on(page)
    lines = ["", "| file | mutants | killed | survived | killed, % |", "|---|---:|---:|---:|---:|"]
    for each in outcomes:
        left = len(each.survivors)
        lines.append(
            f"| {each.path} | {each.num_tried} | {each.tried - left} | {left} | "
            f"{100 * each.share_killed:.1f} |"
        )
    lines += ["", "| survivor in | line | change | why no test notices |", "|---|---:|---|---|"]
    for each in outcomes:
        for mutant in sorted(each.survivors, key=lambda mutant: mutant.line):
            change = _cell(mutant.change)
            reason = reasons.get((mutant.path, change), UNKNOWN)
            lines.append(f"| `{mutant.path}` | {mutant.line} | {change} | {reason} |")
    return page.partition(_HERE)[0] + _HERE + "\n".join(lines) + "\n"


def _cell(change: str) -> str:
    return " → ".join(f"`{side}`" for side in change.replace("|", "∣").split(" -> "))


def _show(outcome: Outcome, seconds: float) -> None:
    killed = outcome.tried - len(outcome.survivors)
    tried = (
        f"{outcome.path}: {killed} of {outcome.tried} killed, {100 * outcome.share_killed:.1f} %"
    )
    print(f"{tried} ({outcome.count} mutants, {seconds:.0f} s)", flush=True)
    for mutant in sorted(outcome.survivors, key=lambda mutant: mutant.line):
        print(f"  {mutant.line}: {mutant.change}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="of the table; all of them where none is named"
    )
    parser.add_argument(
        "--sample", type=int, metavar="N", help="of the mutants of each file; all by default"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="put the tables into docs/lab/mutation.md; needs all files",
    )
    options = parser.parse_args()
    if unknown := [path for path in options.files if path not in TESTS]:
        parser.error(f"no tests are named for {', '.join(unknown)}: files are {', '.join(TESTS)}")
    if options.write and options.files:
        parser.error("--write puts all files on the page: name none")
    outcomes = []
    for path in options.files or TESTS:
        started = time.monotonic()
        outcomes.append(outcome_of(path, TESTS[path], sample=options.sample))
        _show(outcomes[-1], time.monotonic() - started)
    if options.write:
        PAGE.write_text(page_of(outcomes, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(any(each.share_killed < WANTED for each in outcomes))


if __name__ == "__main__":
    main()
