"""`moectl generate`: answer the prompts of a file, many at a time, into a file of answers."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import islice
from pathlib import Path

from artifacts.common.files import check_writable
from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage, Partly
from artifacts.quantisation.replicas import check_base
from moectl.bundled import demo_model
from moectl.generating.answer_file import AnswerFile, appended
from moectl.generating.answering import Answering
from moectl.generating.prompts import PromptFile, PromptRow
from moectl.generating.spread import AnswerRows, SpreadAnswering
from moectl.generating.work import BatchWork
from moectl.shared.batch_size import batch_size
from moectl.shared.defaults import FAST, KV, SLOW
from moectl.shared.opening import existing, open_quietly
from moectl.shared.preset_choice import with_choice
from moectl.shared.progress import Phases
from moectl.shared.resuming import resumable
from moectl.show.answers import tell_fallbacks
from moectl.show.render import show_json
from moectl.show.waiting import Waiting
from profilers.workers.choose import LOCAL, check_device, check_executor, executing, is_spread
from profilers.workers.same_model import SameModel
from runtime.model.open import MoeModel
from runtime.policies.presets import preset
from runtime.session.generate import Sampling
from runtime.session.session import Session
from runtime.session.settings import Settings
from runtime.session.turns import open_batch


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Request to answer a file of prompts: the input, the output and the settings.

    `batch` is the number of requests at a time, None for as many as memory allows.
    """

    data: str
    out: Path
    settings: Settings
    sampling: Sampling
    base: int
    batch: int | None = None
    executor: str = LOCAL
    jobs: int | None = None  # worker processes; None with the local executor: this process alone
    kv: str = FAST
    as_json: bool = False

    def __post_init__(self) -> None:
        check_executor(self.executor)
        if self.kv not in KV:
            raise BadUsage(unknown("place of keys and values", self.kv, KV))

    @property
    def is_spread(self) -> bool:
        return is_spread(self.executor, self.jobs)


@dataclass(frozen=True, slots=True)
class _Job:
    """A request with its model open and its files at hand; `earlier` rows have been answered
    before."""

    name: str
    opened: MoeModel
    prompts: PromptFile
    answers: AnswerFile
    request: GenerateRequest
    store: Path | None
    earlier: int

    def rows(self) -> Iterator[PromptRow]:
        """Yield the rows that are not answered yet."""
        return islice(self.prompts.rows(), self.earlier, None)


def generate_command(
    name: str | None, request: GenerateRequest, waiting: Waiting, *, store: Path
) -> None:
    """Do all of `moectl generate`. `waiting` ends when the model is there. Raises Partly where rows
    have no answer."""
    check_base(request.base)
    prompts = PromptFile.look(request.data)
    check_writable(request.out)
    if request.out.exists() and request.out.samefile(prompts.path):
        raise BadUsage(f"--out {request.out} is the file of prompts: name another")
    name = name or str(demo_model())
    opened = open_quietly(name, device=request.settings.device, dense=request.settings.dense)
    if request.is_spread:
        check_device(opened)
    if request.kv == SLOW and opened.model.device.type == "cpu":
        raise BadUsage("--kv slow is for a model on a GPU: here keys and values lie in RAM already")
    run = run_digest(opened, prompts, request)
    settings, why = with_choice(opened, request.settings, existing(store))
    with appended(request.out, run) as answers:
        if why and not request.as_json:
            print(f"Preset {preset(settings.preset).name}: {why}", file=sys.stderr)
        request = replace(request, settings=settings)
        job = _Job(name, opened, prompts, answers, request, existing(store), answers.num_written)
        (_spread if request.is_spread else _answer)(job, waiting)
        num_bad = answers.num_bad
    if num_bad:
        raise Partly(
            f"{num_bad:,} of {prompts.num_rows:,} rows have an error in {request.out} instead of "
            "an answer"
        )


def run_digest(opened: MoeModel, prompts: PromptFile, request: GenerateRequest) -> str:
    """Stands for everything that an answer depends on: prompts, model, sampling, and what may be
    lost. What changes speed alone may differ from command to command: the budget, the batch, the
    link."""
    settings = request.settings
    policies = preset(settings.preset).name, sorted(settings.policies.items())
    parts = (
        prompts.digest,
        opened.fingerprint,
        astuple(request.sampling),
        policies,
        request.base,
        settings.dense,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _answer(job: _Job, waiting: Waiting) -> None:
    request = job.request
    with Session.over(
        job.opened, request.settings, store=job.store, base=request.base, name=job.name
    ) as session:
        waiting.end()
        in_ram = request.kv == SLOW
        size = batch_size(session, request.batch, in_ram=in_ram)
        with (
            _going_on(job) as told,
            open_batch(session, rows=size.rows, room=size.room, in_ram=in_ram) as batch,
        ):
            answering = Answering(session, batch, request.sampling, job.answers.put)
            answering.run(job.rows(), told)
        _show(job, answering.done, receipt=session.receipt(), batch=batch.rows)


def _spread(job: _Job, waiting: Waiting) -> None:
    request = job.request
    with executing(request.executor, request.jobs) as executor:
        waiting.end()
        work = AnswerRows(
            SameModel.of(job.name, job.opened),
            request.settings,
            store=job.store,
            base=request.base,
            sampling=request.sampling,
            batch=request.batch,
            together=executor.most_together,
        )
        spread = SpreadAnswering(work, executor, job.answers)
        with _going_on(job) as told:
            spread.run(job.rows(), job.prompts.num_rows - job.earlier, told)
        _show(job, spread.done, receipt=spread.receipt, batch=spread.batch)


@contextmanager
def _going_on(job: _Job) -> Iterator[Callable[[BatchWork], None]]:
    """Say what an earlier command has done; lend what moves the line of progress: rows answered,
    tokens a second."""
    num_rows = job.prompts.num_rows
    is_quiet = job.request.as_json
    if job.earlier and not is_quiet:
        print(
            f"{job.request.out} has {job.earlier:,} of {num_rows:,} rows: going on", file=sys.stderr
        )
    with resumable("the answers written so far are kept"), Phases(1.0, is_quiet=is_quiet) as phases:
        advance = phases.begin("answering")

        def told(done: BatchWork) -> None:
            phases.note = (
                f"{job.earlier + done.num_answers:,} of {num_rows:,} rows, "
                f"{done.tokens_per_s:.1f} tokens/s"
            )
            advance(done.num_answers, num_rows - job.earlier)

        yield told


def _show(
    job: _Job, done: BatchWork, *, receipt: Mapping[str, object] | None, batch: int | None
) -> None:
    """Print what was done, or one JSON object; without `receipt` and `batch` where nothing was left
    to do."""
    answers = job.answers
    request = job.request
    if request.as_json:
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
    print(f"{line}, {done.tokens_per_s:.1f} tokens/s{together}; {request.out}")
    if receipt:
        tell_fallbacks(receipt["fallbacks"])
