"""One running request: its text, and its counters and times."""

import time

from moectl.serving.jobs import Done, GenerationJob, TextPiece
from moectl.serving.tally import Tally
from runtime.control.counters import by_layer, totals
from runtime.model.open import MoeModel
from runtime.session.generation.batch import RowResult
from runtime.session.generation.charges import Charge
from runtime.session.generation.stream import Detokeniser, Stops, TokenTiming


class ActiveRequest:
    """Call `take` with what each pass gave it until `done` is set; text goes to the job as it is
    decoded. `preset` is the one in force."""

    def __init__(self, job: GenerationJob, opened: MoeModel, tally: Tally, *, preset: str) -> None:
        self.job = job
        self.done: Done | None = None
        self._tally = tally
        self._preset = preset
        self._text = Detokeniser(opened.tokenizer)
        self._stops = Stops(job.stops)
        self._ends = _end_tokens(opened.model.generation_config.eos_token_id)
        self._waited_s = time.perf_counter() - job.arrived_s
        self._ids: list[int] = []
        self._timing = TokenTiming()
        self._charge = Charge()

    def take(self, result: RowResult) -> None:
        """Take what a pass gave a request that no error has ended."""
        self._charge += result.charge
        if result.token_id is not None:
            self._add(result.token_id, result.num_reused)
        if self._stops.is_met:
            self._end("stop", result.num_reused)
        elif result.is_over:
            self._finish(result.num_reused)

    def _add(self, token_id: int, num_cached: int) -> None:
        self._ids.append(token_id)
        self._timing.seconds.append(time.perf_counter() - self.job.arrived_s)
        if len(self._ids) == 1:
            num_prompt_tokens = self.job.encoded.ids.shape[1]
            self._tally.first(
                self.job.owner, num_prompt_tokens, self._timing.seconds[0], num_cached=num_cached
            )
        else:
            before, now = self._timing.seconds[-2:]
            self._tally.per_token.observe(now - before)
        self._tell(self._stops.add(self._text.add(token_id)))

    def _finish(self, num_cached: int) -> None:
        self._tell(self._stops.add(self._text.rest()))
        if not self._stops.is_met:
            self._tell(self._stops.rest())
        # The model's generation settings may end a text otherwise, by `stop_strings` for one.
        is_stopped = self._stops.is_met or len(self._ids) < self.job.encoded.sampling.max_new_tokens
        is_stopped |= bool(self._ids) and self._ids[-1] in self._ends
        self._end("stop" if is_stopped else "length", num_cached)

    def _tell(self, text: str) -> None:
        if text:
            self.job.tell(TextPiece(text))

    def _end(self, reason: str, num_cached: int) -> None:
        self.done = Done(reason, len(self._ids), self._took(), num_cached)

    def _took(self) -> dict[str, object]:
        layers = by_layer(self._charge.counters)
        return {
            "preset": self._preset,
            "token_ids": self._ids,
            "counters": totals(layers) | {"exposed_ms": self._charge.exposed_s * 1e3},
            "by_layer": layers,
            "waited_ms": self._waited_s * 1e3,
            "ttft_ms": self._timing.ttft_ms,
            "tpot_ms": self._timing.tpot_ms,
        }


def _end_tokens(ids: int | list[int] | None) -> set[int]:
    return set(ids) if isinstance(ids, list) else {ids} - {None}
