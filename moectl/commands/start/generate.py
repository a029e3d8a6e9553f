"""`moectl generate`: answer the prompts of a file, many at a time, into a file of answers."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.common.files import check_writable
from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage, Partly
from artifacts.modelshapes.kv_cache import AUTO
from moectl.bundled import demo_model
from moectl.cli.options import (
    AvgBits,
    Executor,
    Json,
    Model,
    PolicyOptions,
    PresetOptions,
    RunOptions,
    SamplingOptions,
    StorePath,
    Verify,
)
from moectl.shared.defaults import DEFAULT_STORE, FAST, KV, SLOW
from moectl.shared.importing import importing
from moectl.shared.terminal.resuming import resumable

if TYPE_CHECKING:
    from moectl.generating.answer_file import AnswerFile
    from moectl.generating.prompts import PromptFile, PromptRow
    from moectl.generating.work import BatchWork
    from moectl.shared.opening import Settled
    from moectl.shared.terminal.waiting import Waiting
    from runtime.model.open import MoeModel
    from runtime.session.generation.sampling import Sampling
    from runtime.session.settings import Settings


_USUAL_BATCH = 8  # requests whose keys and values an automatic budget leaves room for


@dataclass(frozen=True, slots=True)
class _Job:
    """Prompts to answer with an open model, and files at hand; `earlier` rows have been answered
    before.

    `batch` is the number of requests at a time, None for as many as memory allows. `jobs` is the
    number of worker processes; None with the local executor: this process alone.
    """

    name: str
    opened: "MoeModel"
    prompts: "PromptFile"
    answers: "AnswerFile"
    out: Path
    choice: "Settled"
    sampling: "Sampling"
    base: int
    batch: int | None
    executor: str
    jobs: int | None
    in_ram: bool
    as_json: bool
    has_counters: bool
    store: Path | None
    earlier: int

    def rows(self) -> Iterator["PromptRow"]:
        """Yield the rows that are not answered yet."""
        return islice(self.prompts.rows(), self.earlier, None)


def generate(
    *,
    model: Model = None,
    data: Annotated[
        str, typer.Option(metavar="FILE", help="Prompts: a text, jsonl or parquet file.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Answers, a JSON line each; begun ones go on.")
    ],
    batch: Annotated[
        int | None, typer.Option(min=1, help="Prompts at a time; else what memory allows.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Processes that answer, each on one thread and with the budget; else this one "
                "alone."
            ),
        ),
    ] = None,
    executor: Executor = "local",
    kv: Annotated[
        str,
        typer.Option(help="Where keys and values lie: fast, beside the model, or slow, in RAM."),
    ] = FAST,
    counters: Annotated[
        bool, typer.Option("--counters", help="Add to each answer what it took of its passes.")
    ] = False,
    chosen: PresetOptions,
    policies: PolicyOptions,
    avg_bits: AvgBits = None,
    options: RunOptions,
    drawn: SamplingOptions,
    verify: Verify = False,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Answer the prompts of a file, many at a time.

    An expert that is loaded serves every prompt that wants it. The same command goes on where it
    was stopped.
    """
    from moectl.show.waiting import loading

    settings = chosen.settings(
        store,
        options,
        model=model,
        base=options.base,
        policies=policies.given(avg_bits),
        verify=verify,
    )
    with loading(model, preset=chosen.preset, budget=chosen.budget, is_quiet=json) as waiting:
        with importing(says=""):
            from artifacts.quantisation.replicas import check_base
            from moectl.generating.answer_file import appended
            from moectl.generating.prompts import PromptFile
            from moectl.shared.opening import CONTEXT, existing, open_quietly, settled
            from profilers.hardware.this_machine import num_cores
            from profilers.workers.choose import check_device, check_executor, is_spread
            from runtime.devices import is_host

        sampling = drawn.sampling()
        check_executor(executor)
        if kv not in KV:
            raise BadUsage(unknown("place of keys and values", kv, KV))
        check_base(options.base)
        prompts = PromptFile.look(data)
        check_writable(out)
        if out.exists() and out.samefile(prompts.path):
            raise BadUsage(f"--out {out} is the file of prompts: name another")
        name = model or str(demo_model())
        opened = open_quietly(name, device=settings.device, dense=settings.dense)
        spread = is_spread(executor, jobs)
        if spread:
            check_device(opened)
        if kv == SLOW and is_host(opened.model.device):
            raise BadUsage(
                "--kv slow is for a model on a GPU: here keys and values lie in RAM already"
            )
        run = _digest(opened, prompts, settings, sampling, options.base)
        choice = settled(
            opened,
            settings,
            existing(store),
            num_cached=(batch or _USUAL_BATCH) * CONTEXT if kv == FAST else None,
            together=jobs or (num_cores() if spread else 1),
        )
        with appended(out, run) as answers:
            if not json:
                choice.tell()
            job = _Job(
                name,
                opened,
                prompts,
                answers,
                out,
                choice,
                sampling,
                options.base,
                batch,
                executor,
                jobs,
                kv == SLOW,
                json,
                counters,
                existing(store),
                answers.num_written,
            )
            (_spread if spread else _answer)(job, waiting)
            num_bad = answers.num_bad
    if num_bad:
        raise Partly(
            f"{num_bad:,} of {prompts.num_rows:,} rows have an error in {out} instead of an answer"
        )


def _digest(
    opened: "MoeModel", prompts: "PromptFile", settings: "Settings", sampling: "Sampling", base: int
) -> str:
    """Stands for everything that an answer depends on: prompts, model, sampling, and what may be
    lost. What changes speed alone may differ from command to command: the budget, the batch, the
    link."""
    from runtime.policies.presets import preset

    policies = preset(settings.preset).name, sorted(settings.policies.items())
    parts = (
        prompts.digest,
        opened.fingerprint,
        astuple(sampling),
        policies,
        base,
        settings.dense,
        *[settings.kv_cache_dtype] * (settings.kv_cache_dtype != AUTO),
        *[f"activations {settings.activations}"] * (settings.activations is not None),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _answer(job: _Job, waiting: "Waiting") -> None:
    from moectl.generating.answering import Answering
    from moectl.shared.batch_size import batch_size
    from moectl.shared.opening import open_session
    from runtime.session.generation.round_robin import open_batch

    with open_session(
        job.opened, job.choice, store=job.store, base=job.base, name=job.name
    ) as session:
        waiting.end()
        size = batch_size(session, job.batch, in_ram=job.in_ram)
        with (
            _going_on(job) as told,
            open_batch(session, rows=size.rows, room=size.room, in_ram=job.in_ram) as batch,
        ):
            answering = Answering(
                session, batch, job.sampling, job.answers.put, has_counters=job.has_counters
            )
            answering.run(job.rows(), told)
        _show(job, answering.done, receipt=session.receipt(), batch=batch.rows)


def _spread(job: _Job, waiting: "Waiting") -> None:
    from moectl.generating.spread import AnswerRows, SpreadAnswering
    from profilers.workers.choose import executing
    from profilers.workers.same_model import SameModel

    with executing(job.executor, job.jobs) as executor:
        waiting.end()
        work = AnswerRows(
            SameModel.of(job.name, job.opened),
            job.choice.settings,
            store=job.store,
            base=job.base,
            sampling=job.sampling,
            batch=job.batch,
            together=executor.most_together,
            has_counters=job.has_counters,
        )
        spread = SpreadAnswering(work, executor, job.answers)
        with _going_on(job) as told:
            spread.run(job.rows(), job.prompts.num_rows - job.earlier, told)
        _show(job, spread.done, receipt=spread.receipt, batch=spread.batch)


@contextmanager
def _going_on(job: _Job) -> Iterator[Callable[["BatchWork"], None]]:
    """Say what an earlier command has done; lend what moves the line of progress: rows answered,
    tokens a second."""
    from moectl.shared.terminal.progress import Phases

    num_rows = job.prompts.num_rows
    is_quiet = job.as_json
    if job.earlier and not is_quiet:
        print(f"{job.out} has {job.earlier:,} of {num_rows:,} rows: going on", file=sys.stderr)
    with resumable("the answers written so far are kept"), Phases(1.0, is_quiet=is_quiet) as phases:
        advance = phases.begin("answering")

        def told(done: "BatchWork") -> None:
            phases.note = (
                f"{job.earlier + done.num_answers:,} of {num_rows:,} rows, "
                f"{done.tokens_per_s:.1f} tokens/s"
            )
            advance(done.num_answers, num_rows - job.earlier)

        yield told


def _show(
    job: _Job, done: "BatchWork", *, receipt: Mapping[str, object] | None, batch: int | None
) -> None:
    """Print what was done, or one JSON object; without `receipt` and `batch` where nothing was left
    to do."""
    from moectl.show.answers import tell_fallbacks, waits
    from moectl.show.render import show_json

    answers = job.answers
    if job.as_json:
        show_json(
            {
                "rows": answers.num_written,
                "earlier": job.earlier,
                "errors": answers.num_bad,
                "prompt_tokens": done.num_prompt_tokens,
                "tokens": done.num_tokens,
                "passes": done.num_passes,
                "seconds": done.seconds,
                "tokens_per_s": done.tokens_per_s,
                "batch": batch,
                "counters": {**done.counters, "exposed_ms": done.exposed_ms},
                "receipt": receipt,
            }
        )
        return
    line = (
        f"{answers.num_written - job.earlier:,} rows in {done.seconds:.1f} s: {done.num_tokens:,} "
        "tokens"
    )
    together = f", up to {batch} at a time" if batch else ""
    cost = "; ".join(waits(done.counters, done.exposed_ms))
    print(f"{line}, {done.tokens_per_s:.1f} tokens/s{together}; {cost}; {job.out}")
    if receipt:
        tell_fallbacks(receipt["fallbacks"])
