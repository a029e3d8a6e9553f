"""Encoding of a job's prompt: its token ids, and the number of tokens that its answer may have."""

from dataclasses import replace

import torch

from artifacts.errors import Problem
from moectl.serving.guard import ServerLimits
from moectl.serving.jobs import Encoded, Failed, GenerationJob
from runtime.session.generation.sampling import TooLong, check_prompt, num_positions
from runtime.session.session import Session


def encoded(job: GenerationJob, session: Session, limits: ServerLimits) -> Encoded | Failed:
    """Encode the prompt of a job. Failed for a prompt that the tokenizer, its template or the model
    cannot take."""
    try:
        ids = job.prompt if isinstance(job.prompt, torch.Tensor) else session.encode(job.prompt)
        return Encoded(
            ids, replace(job.sampling, max_new_tokens=_num_new(job, ids, session, limits))
        )
    except Problem as problem:
        return Failed(str(problem), 400, code_of(problem))
    except (ValueError, OverflowError) as error:
        return Failed(f"the prompt cannot be encoded: {error}", 400)


def code_of(problem: Problem) -> str | None:
    """The code of an error in OpenAI's API, where it has one."""
    return "context_length_exceeded" if isinstance(problem, TooLong) else None


def _num_new(job: GenerationJob, ids: torch.Tensor, session: Session, limits: ServerLimits) -> int:
    """The largest number of tokens of the answer: as requested, else as many as fit."""
    model = session.opened.model
    check_prompt(model, ids, job.max_tokens or 1)
    room = (num_positions(model) or ids.shape[1] + limits.max_tokens) - ids.shape[1]
    return job.max_tokens or min(limits.max_tokens, room)
