"""One running request: its generation, its text, and its counters and times."""

import time

import numpy as np

from moectl.serving.jobs import Done, GenerationJob, TextPiece
from moectl.serving.tally import Tally
from runtime.control.counters import by_layer, totals
from runtime.session.detokenise import Detokeniser, Stops
from runtime.session.generate import Token, TokenTiming
from runtime.session.interleave import Interleave


class ActiveRequest:
    """Call `step` until `done` is set; text goes to the job as it is decoded. `preset` is the one in force."""

    def __init__(self, job: GenerationJob, rows: Interleave, tally: Tally, *, preset: str) -> None:
        self.job = job
        self.done: Done | None = None
        opened, encoded = rows.session.opened, job.encoded
        self._generation, self._tally, self._preset = rows.begin(encoded.ids, encoded.sampling), tally, preset
        self._text, self._stops = Detokeniser(opened.tokenizer), Stops(job.stops)
        self._ends = _end_tokens(opened.model.generation_config.eos_token_id)
        self._waited_s = time.perf_counter() - job.arrived_s
        self._ids: list[int] = []
        self._timing = TokenTiming()
        self._counters: np.ndarray | int = 0
        self._exposed_s = 0.0

    def step(self) -> None:
        """Run one pass. Raises the error of a pass that fails."""
        turn = self._generation.step()
        self._tally.turn(turn)
        self._counters = self._counters + turn.counters
        self._exposed_s += turn.exposed_s
        if turn.token is not None:
            self._take(turn.token)
        if self._generation.is_over and not self.done:
            self._tell(self._stops.add(self._text.rest()))
            if not self._stops.is_met:
                self._tell(self._stops.rest())
            # The model's generation settings may end a text otherwise, by `stop_strings` for one.
            is_stopped = self._stops.is_met or len(self._ids) < self.job.encoded.sampling.max_new_tokens
            is_stopped |= bool(self._ids) and self._ids[-1] in self._ends
            self._end("stop" if is_stopped else "length")

    def close(self) -> None:
        """End the generation and free its memory."""
        self._generation.close()

    def _take(self, token: Token) -> None:
        self._ids.append(token.token_id)
        self._timing.seconds.append(time.perf_counter() - self.job.arrived_s)
        if len(self._ids) == 1:
            self._tally.first(self.job.encoded.ids.shape[1], self._timing.seconds[0])
        self._tell(self._stops.add(self._text.add(token.token_id)))
        if self._stops.is_met:
            self._end("stop")

    def _tell(self, text: str) -> None:
        if text:
            self.job.tell(TextPiece(text))

    def _end(self, reason: str) -> None:
        self.done = Done(reason, len(self._ids), self._took())

    def _took(self) -> dict[str, object]:
        layers = by_layer(self._counters)
        return {
            "preset": self._preset,
            "token_ids": self._ids,
            "counters": totals(layers) | {"exposed_ms": self._exposed_s * 1e3},
            "by_layer": layers,
            "waited_ms": self._waited_s * 1e3,
            "ttft_ms": self._timing.ttft_ms,
            "tpot_ms": self._timing.tpot_ms,
        }


def _end_tokens(ids: int | list[int] | None) -> set[int]:
    return set(ids) if isinstance(ids, list) else {ids} - {None}
