"""One request that shares no pass: each of its passes is as transformers' generate() runs it."""

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from artifacts.routing.coactivation import NotFiniteWeights
from runtime.session.generation.charges import Charge
from runtime.session.generation.finite import NotFinite
from runtime.session.generation.sampler import NextToken, draw
from runtime.session.generation.sampling import Sampling

if TYPE_CHECKING:
    from runtime.session.session import Session


class PassMeter:
    """Measures the passes that a session runs from here on."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._begin_s = time.perf_counter()
        self._first_pass = session.num_passes

    def charge(self) -> Charge:
        """Return what the passes so far took."""
        session = self._session
        return Charge(
            session.controller.counters.sum(first_pass=self._first_pass),
            exposed_s=sum(session.engine.stall_s[self._first_pass :]),
            seconds=time.perf_counter() - self._begin_s,
        )


class Generation:
    """Answers a prompt [1, S] int64 with keys and values of its own: call `step` until `is_over`,
    or `close` to free them earlier. Passes of other requests may run in between; they change no bit
    where the policies lose nothing.

    Raises BadInput for a prompt that the model cannot take.
    """

    def __init__(self, session: "Session", prompt: torch.Tensor, sampling: Sampling) -> None:
        opened = session.opened
        self._session = session
        self._next_token = NextToken(
            opened.model, prompt.to(opened.model.device), sampling, tokenizer=opened.tokenizer
        )
        self._num_read = 0
        self._request = session.new_requests(1)

    @property
    def is_over(self) -> bool:
        return self._next_token.is_over

    def step(self) -> tuple[int, Charge]:
        """Run one pass. Returns its token, and what it took. An error ends the generation; numbers
        that are not finite raise NotFinite."""
        session = self._session
        try:
            with session.lock, torch.inference_mode():
                meter = PassMeter(session)
                [token] = draw([self._next_token], self._forward())
                charge = meter.charge()
            if isinstance(token, Exception):
                raise token
        except NotFinite as error:
            self.close()
            raise session.traced(error) from None
        except NotFiniteWeights:  # of a router
            self.close()
            ids = self._next_token.tokens
            raise session.traced(NotFinite(ids, session.opened.dtype)) from None
        except BaseException:
            self.close()
            raise
        if self.is_over:
            self.close()
        return token, charge

    def close(self) -> None:
        """End the generation, and free its keys and values."""
        self._next_token.is_over = True
        self._next_token.inputs.clear()

    def _forward(self) -> torch.Tensor:
        """Read the tokens that were not read yet. Returns the logits [1, V] after the last one."""
        model = self._session.opened.model
        inputs = self._next_token.inputs
        ids = self._next_token.tokens
        length = ids.shape[1] - self._num_read
        given = model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=length,
            is_first_iteration=not self._num_read,
            **inputs,
        )
        requests = np.full(length, self._request, np.int32)
        output = self._session.run_pass(requests, **given, return_dict=True)
        self._num_read += length
        inputs.update(model._update_model_kwargs_for_generation(output, inputs))
        return output.logits[:, -1]
