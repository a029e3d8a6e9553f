"""`moectl generate`: answer the prompts of a file, many at a time, into a file of answers."""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

from artifacts.common.files import check_writable
from artifacts.errors import BadUsage, Partly
from artifacts.quantisation.replicas import check_base
from moectl.bundled import demo_model
from moectl.generating.answer_file import AnswerFile, appended
from moectl.generating.answering import Answering, BatchWork
from moectl.generating.batch_size import batch_size
from moectl.generating.prompts import PromptFile
from moectl.shared.opening import existing, open_quietly
from moectl.shared.preset_choice import with_choice
from moectl.shared.progress import Phases
from moectl.shared.resuming import resumable
from moectl.show.answers import tell_fallbacks
from moectl.show.render import show_json
from moectl.show.waiting import Waiting
from runtime.model.open import MoeModel
from runtime.policies.presets import preset
from runtime.session.generate import Sampling
from runtime.session.one_by_one import open_batch
from runtime.session.session import Session
from runtime.session.settings import Settings


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What to answer, where to, and how; `batch`: requests at a time, None: as many as memory allows."""

    data: str
    out: Path
    settings: Settings
    sampling: Sampling
    base: int
    batch: int | None = None
    as_json: bool = False


def generate_command(name: str | None, request: GenerateRequest, waiting: Waiting, *, store: Path) -> None:
    """Do all of `moectl generate`. `waiting` ends when the model is there. Raises Partly where rows have no answer."""
    check_base(request.base)
    prompts = PromptFile.look(request.data)
    check_writable(request.out)
    if request.out.exists() and request.out.samefile(prompts.path):
        raise BadUsage(f"--out {request.out} is the file of prompts: name another")
    name = name or str(demo_model())
    opened = open_quietly(name, device=request.settings.device, dense=request.settings.dense)
    run = run_digest(opened, prompts, request)
    settings, why = with_choice(opened, request.settings, existing(store))
    with (
        Session.over(opened, settings, store=existing(store), base=request.base, name=name) as session,
        appended(request.out, run) as answers,
    ):
        waiting.end()
        if why and not request.as_json:
            print(f"Preset {session.receipt()['preset']}: {why}", file=sys.stderr)
        _answer(session, prompts, answers, request)
        num_bad = answers.num_bad
    if num_bad:
        raise Partly(f"{num_bad:,} of {prompts.num_rows:,} rows have an error in {request.out} instead of an answer")


def run_digest(opened: MoeModel, prompts: PromptFile, request: GenerateRequest) -> str:
    """Stands for everything that an answer depends on: prompts, model, sampling, and what may be lost. What changes
    speed alone may differ from command to command: the budget, the batch, the link."""
    settings = request.settings
    policies = preset(settings.preset).name, sorted(settings.policies.items())
    parts = prompts.digest, opened.fingerprint, astuple(request.sampling), policies, request.base, settings.dense
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _answer(session: Session, prompts: PromptFile, answers: AnswerFile, request: GenerateRequest) -> None:
    size, earlier = batch_size(session, request.batch), answers.num_written
    if earlier and not request.as_json:
        print(f"{request.out} has {earlier:,} of {prompts.num_rows:,} rows: going on", file=sys.stderr)
    with (
        resumable("the answers written so far are kept"),
        Phases(1.0, is_quiet=request.as_json) as phases,
        open_batch(session, rows=size.rows, room=size.room) as batch,
    ):
        answering = Answering(session, batch, request.sampling, answers)
        answering.run(prompts, _told(phases, earlier=earlier, num_rows=prompts.num_rows))
    _show(session, answering.done, answers, request, rows=batch.rows, earlier=earlier)


def _told(phases: Phases, *, earlier: int, num_rows: int) -> Callable[[BatchWork], None]:
    """Move the line of progress: the rows that are answered, and the tokens a second."""
    advance = phases.begin("answering")

    def told(done: BatchWork) -> None:
        phases.note = f"{earlier + done.num_answers:,} of {num_rows:,} rows, {done.tokens_per_s:.1f} tokens/s"
        advance(done.num_answers, num_rows - earlier)

    return told


def _show(
    session: Session, done: BatchWork, answers: AnswerFile, request: GenerateRequest, *, rows: int, earlier: int
) -> None:
    receipt, effort = session.receipt(), session.effort()
    if request.as_json:
        show_json(
            {
                "rows": answers.num_written,
                "earlier": earlier,
                "errors": answers.num_bad,
                "prompt_tokens": done.num_prompt_tokens,
                "tokens": done.num_tokens,
                "passes": done.num_passes,
                "seconds": done.seconds,
                "tokens_per_s": done.tokens_per_s,
                "batch": rows,
                "counters": effort.counters | {"exposed_ms": effort.exposed_ms},
                "receipt": receipt,
            }
        )
        return
    line = f"{answers.num_written - earlier:,} rows in {done.seconds:.1f} s: {done.num_tokens:,} tokens"
    print(f"{line}, {done.tokens_per_s:.1f} tokens/s, up to {rows} at a time; {request.out}")
    tell_fallbacks(receipt["fallbacks"])
