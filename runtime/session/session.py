"""A model that runs at a budget: text or tensors in, text or logits out, and the effort of each
answer."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedConfig

from artifacts.errors import BadInput, BadUsage
from artifacts.quantisation.replicas import check_base
from artifacts.routing.coactivation import NotFiniteWeights
from artifacts.shape import FULL_BITS
from artifacts.tables import Receipt, Results, html_table
from runtime.control import sizes
from runtime.control.counters import Counter
from runtime.control.recorder import Recorder
from runtime.devices import is_host, resolve_device
from runtime.drafters.base import MOST, NONE, Draft
from runtime.model.kv_cache import coding_of
from runtime.model.layout import ALIGNMENT
from runtime.model.open import MoeModel, open_model
from runtime.model.rows.passes import RowPass
from runtime.policies.base import Artefacts, FastTier
from runtime.session.build import build_parts, lay_out_slots
from runtime.session.equip import equip
from runtime.session.generation.charges import Charge
from runtime.session.generation.drafted import DraftVerifier, drawn_by
from runtime.session.generation.finite import NotFinite, first_place
from runtime.session.generation.grammar.grammars import Grammars
from runtime.session.generation.round_robin import answer_all
from runtime.session.generation.sampling import Sampler, Sampling, check_biases, check_tokens
from runtime.session.generation.single import Drawn, Generation
from runtime.session.generation.stream import Answer, Effort, Stream, Token
from runtime.session.parts import observe, reconfiguration
from runtime.session.prompts.encoder import Prompt, PromptEncoder
from runtime.session.receipt import fallbacks_of, receipt
from runtime.session.replies.reply import Reply
from runtime.session.settings import Settings
from runtime.tiers.slots import Slots

_CLOSING_S = 10.0  # for which closing waits for the pass of another thread


class Output(Protocol):
    """Output of one pass: logits [B, S, V], and the keys and values that the next pass continues
    from."""

    logits: torch.Tensor
    past_key_values: object


class Session:
    """A model that runs at a budget. A context manager; once it is closed, the opened model can be
    used again.

    Any thread may call it: a pass waits for the pass of another thread, which holds `lock`. A
    request that fails empties the fast tier and changes nothing else. `parts` has everything that
    the session runs with; `opened`, `controller`, `watcher` and `engine` are among them.
    """

    def __init__(
        self, opened: MoeModel, settings: Settings, *, artefacts: Artefacts | None = None
    ) -> None:
        self.lock = threading.RLock()
        self._is_closed = False
        self._next_request = 0
        self.kv_coding = coding_of(opened.model, settings.kv_cache_dtype)
        with ExitStack() as undo:
            self.parts = build_parts(opened, settings, artefacts or Artefacts(), undo)
            self.opened = self.parts.opened
            self.controller = self.parts.controller
            self.watcher = self.parts.watcher
            self.engine = self.parts.engine
            self.reconfiguration = reconfiguration(self.parts, lay_out=self._lay_out)
            self.fallbacks = fallbacks_of(self.parts, self.kv_coding)
            self.prompts = PromptEncoder(opened, fallbacks=self.fallbacks)
            undo.callback(self.prompts.close)
            self.grammars = Grammars(opened)
            self.verifier = self._verifier(Draft.parse(settings.draft))
            self._undo = undo.pop_all()

    @classmethod
    def open(
        cls,
        name: str | Path,
        settings: Settings | None = None,
        *,
        store: str | Path | None = None,
        base: int = FULL_BITS,
    ) -> "Session":
        """Open a checkpoint (folder or hub id) and run it by `settings`, with the artefacts that
        `store` holds for it. Below 16 bits, `base` takes the stored replicas of that width for the
        experts.

        Raises BadUsage, BadInput for a model or a store that cannot be used, Incompatible for a
        missing artefact that the policies require, and OutOfResources.
        """
        settings = settings or Settings()
        check_base(base)
        opened = open_model(str(name), device=resolve_device(settings.device), dense=settings.dense)
        return cls.over(opened, settings, store=store, base=base, name=str(name))

    @classmethod
    def over(
        cls,
        opened: MoeModel,
        settings: Settings,
        *,
        store: str | Path | None = None,
        base: int = FULL_BITS,
        name: str = "this model",
    ) -> "Session":
        """Run a model that is open already and that no other session uses; errors call it `name`.
        The rest is as for `open`, but `settings.dense` is that with which the model was opened."""
        path = None if store is None else Path(store)
        opened, settings, artefacts = equip(opened, settings, name=name, store=path, base=base)
        return cls(opened, settings, artefacts=artefacts)

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Refuse further passes, free the fast tier and give the model back. Further calls do
        nothing."""
        self._is_closed = True
        if self.lock.acquire(timeout=_CLOSING_S):
            self.lock.release()
        self._undo.close()

    def validate(self) -> None:
        """Raise AssertionError where the session's state contradicts itself or exceeds the budget.
        Call it between passes."""
        self.engine.validate()
        nbytes = self.parts.fast_nbytes
        budget = sizes.budget_nbytes(self.parts.budget, self.opened.shape)
        borders = ALIGNMENT * (len(self.parts.slots) + 1)
        assert nbytes <= budget + borders, f"{nbytes} bytes of fast tier, the budget is {budget}"

    # Running

    def forward(
        self, ids: torch.Tensor, *, mask: torch.Tensor | None = None, past: object = None
    ) -> Output:
        """Run one pass, prefill or decode: ids [B, S], mask [B, past + S]. Returns the model's
        output, logits [B, S, V].

        Raises BadInput for tokens outside the vocabulary, for more tokens than the model has
        positions, and for a mask where the family's code reads a setting that the config lacks.
        """
        with self.lock, torch.inference_mode():
            self._begin_pass()
            self._check(ids, past)
            if past is None and self.kv_coding:
                past = self.kv_coding.cache(self.opened.model)
            try:
                return self.opened.model(
                    input_ids=ids.to(self.opened.model.device),
                    attention_mask=None if mask is None else mask.to(self.opened.model.device),
                    past_key_values=past,
                    use_cache=True,
                )
            except AttributeError as error:
                if mask is None or not isinstance(error.obj, PreTrainedConfig):
                    raise
                raise BadInput(
                    f"transformers' {self.opened.family} needs {error.name} for a batch, and the "
                    "config.json has none: add it, or give one prompt at a time"
                ) from error

    def forward_rows(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: RowPass,
        *,
        requests: np.ndarray,
        keep: torch.Tensor,
        drafted: np.ndarray | None = None,
    ) -> Output:
        """Run one pass over tokens of several requests: ids, positions, `requests` and `drafted`
        [T], as the pieces of `rows` lie. Returns the model's output, with the logits [1, N, V] of
        the tokens `keep` [N]. Raises as `forward`, for ids that were checked."""
        given = {"input_ids": ids[None], "position_ids": positions[None], "logits_to_keep": keep}
        given = {name: tensor.to(self.opened.model.device) for name, tensor in given.items()}
        asked = self.verifier.asked if self.verifier else {}
        return self.run_pass(requests, drafted=drafted, **given, **rows.inputs(), **asked)

    def run_pass(
        self, requests: np.ndarray, *, drafted: np.ndarray | None = None, **given: object
    ) -> Output:
        """Run one pass of the model over tokens of the requests [T], with inputs that were
        checked; those `drafted` [T] are drafts. Returns the model's output. Raises BadUsage once
        the session is closed."""
        with self.lock, torch.inference_mode():
            self._begin_pass()
            self.watcher.token_requests = requests
            self.watcher.drafted = drafted
            try:
                return self.opened.model(**given)
            finally:
                self.watcher.token_requests = None
                self.watcher.drafted = None

    def _begin_pass(self) -> None:
        self._check_open()
        # A new thread has torch's default number of threads until it asks for the right one, and
        # products round differently with another.
        torch.get_num_threads()

    def _check_open(self) -> None:
        if self._is_closed:
            raise BadUsage("the session is closed: open another one")

    def reread(self, ids: torch.Tensor) -> Output:
        """Run the tokens [B, S] of a prompt again, in one pass that policies take for decoding. Its
        logits show the loss that policies cause there, also at the prompt's own tokens. Raises as
        `forward`."""
        self.watcher.decodes = True
        try:
            return self.forward(ids)
        finally:
            self.watcher.decodes = False

    def _check(self, ids: torch.Tensor, past: object) -> None:
        """Raise BadInput or TooLong for tokens that the model cannot take. Ids on a GPU are not
        copied back to be checked."""
        highest = int(ids.max()) if is_host(ids.device) and ids.numel() else 0
        length = ids.shape[1] + (past.get_seq_length() if past is not None else 0)
        check_tokens(self.opened.model, highest=highest, length=length, what=f"{length} tokens")

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Stream:
        """Continue a text, or the turns of a chat, piece by piece. Raises BadInput for a prompt
        that cannot be encoded."""
        encoded = self.prompts.encode(prompt)
        sampling = replace(sampling or Sampling(), thoughts=encoded.thoughts)
        generate = partial(self.tokens, encoded.ids, sampling)
        return Stream(
            generate,
            tokenizer=self.opened.tokenizer,
            form=encoded.form,
            effort=self.effort(first_pass=self.num_passes),
            receipt=self.receipt,
        )

    def generate(self, prompt: Prompt, sampling: Sampling | None = None) -> Answer:
        """Return the answer to a text, or to the turns of a chat, once it is whole. Raises
        BadInput for a prompt that cannot be encoded."""
        return self.stream(prompt, sampling).answer()

    def chat(
        self, turns: Sequence[Mapping[str, object]], sampling: Sampling | None = None
    ) -> Reply:
        """Return the reply to the turns of a chat, taken apart: what it says, what the model
        thought before, and the tools that it calls. Raises BadInput."""
        return Reply.of(self.stream(turns, sampling).pieces())

    def batch(self, prompts: Sequence[Prompt], sampling: Sampling | None = None) -> Results[Answer]:
        """Return the answers to many prompts, which share passes where the model can: an expert
        that is loaded serves all of them. Raises BadInput for a prompt that cannot be encoded or
        answered."""
        encoded = [self.encode(prompt) for prompt in prompts]
        return answer_all(self, encoded, sampling or Sampling(), receipt=self.receipt)

    def encode(self, prompt: Prompt) -> torch.Tensor:
        """Return token ids [1, S] int64; those of a chat by the tokenizer's template. Without a
        template the turns are separated by blank lines, and the receipt says so. Raises
        BadInput."""
        return self.prompts.encode(prompt).ids

    def tokens(
        self,
        prompt: torch.Tensor,
        sampling: Sampling,
        *,
        on_end: Callable[[Effort], None] | None = None,
    ) -> Iterator[Token]:
        """Stream tokens after `prompt` [1, S] int64; passes of other requests may run in between.
        `on_end` is called with the effort of this generation once it ends. Raises BadInput for a
        prompt that the model cannot take."""
        charge = Charge(np.zeros((len(Counter), self.opened.shape.num_layers), np.int64))
        seconds = -time.perf_counter()
        generation = self.begin(prompt, sampling)
        index = 0
        try:
            while not generation.is_over:
                drawn, took = self.step(generation)
                charge += took
                for one in drawn:
                    seconds += time.perf_counter()
                    yield Token(one.token_id, index, seconds, one.logprobs)
                    seconds -= time.perf_counter()
                    index += 1
        finally:
            if on_end:
                on_end(Effort.of(charge))

    def begin(
        self, prompt: torch.Tensor, sampling: Sampling, *, most_drafts: int = MOST
    ) -> Generation:
        """Begin a request with a prompt [1, S] int64, of at most so many drafts a pass: call `step`
        until it is over. Raises BadInput for a prompt that the model cannot take."""
        sampler = self.sampler(prompt, sampling)
        if self.kv_coding and "past_key_values" in sampler.inputs:  # or it keeps none
            self.kv_coding.take_over(sampler.inputs["past_key_values"])
        generation = Generation(self.new_requests(1), sampler)
        if self.verifier and most_drafts:
            self.verifier.begin_alone(generation, most_drafts)
        return generation

    def prepare(self, sampling: Sampling) -> None:
        """Make ready what the options of a request need, so that no pass waits for it. Raises
        BadInput for a bias or a grammar that cannot be used, BadUsage without llguidance."""
        check_biases(self.opened.model, sampling)
        if sampling.grammar:
            self.grammars.prepare(sampling.grammar)
        if sampling.num_logprobs is not None:
            _ = self.grammars.vocabulary

    def sampler(self, prompt: torch.Tensor, sampling: Sampling) -> Sampler:
        """Return the rules for an answer to a prompt [1, S] int64. Raises BadInput for a prompt or
        a grammar that cannot be used."""
        model = self.opened.model
        grammar = sampling.grammar
        rule = self.grammars.rule(grammar, sampling.thoughts) if grammar else None
        prompt = prompt.to(model.device)
        return Sampler(model, prompt, sampling, tokenizer=self.opened.tokenizer, rule=rule)

    def step(self, generation: Generation) -> tuple[list[Drawn], Charge]:
        """Run one pass of a request alone, and another one where it leaves a tie. Returns its
        tokens, several where drafts were accepted, and what it took. An error ends the request;
        numbers that are not finite raise NotFinite. Passes of other requests may run in between,
        which change no bit where the policies lose nothing."""
        begin_s = time.perf_counter()
        try:
            with self.lock, torch.inference_mode():
                first_pass = self.num_passes
                drawn = self._drawn(generation)
                charge = self.charge_since(first_pass, begin_s=begin_s)
        except BaseException as error:
            generation.close()
            if isinstance(error, NotFinite):
                raise self.traced(error) from None
            raise
        if generation.is_over:
            generation.close()
        return drawn, charge

    def _drawn(self, generation: Generation) -> list[Drawn]:
        try:
            if generation.drafts is not None:
                return self.verifier.step(generation)
            return [drawn_by(generation.sampler, self._logits(generation))]
        except NotFiniteWeights:  # of a router
            raise NotFinite(generation.sampler.tokens, self.opened.dtype) from None

    def _logits(self, generation: Generation) -> torch.Tensor:
        """Return the logits [1, V] after the last token of a request."""
        model = self.opened.model
        num_unread = generation.sampler.length - generation.num_read
        requests = np.full(num_unread, generation.request, np.int32)
        output = self.run_pass(requests, **generation.next_inputs(model), return_dict=True)
        generation.move_on(model, output, num_unread)
        generation.output = output if generation.drafts is not None else None
        return output.logits[:, -1]

    def _verifier(self, draft: Draft) -> DraftVerifier | None:
        """Return what answers requests with drafts; None where nothing is drafted."""
        if draft.name == NONE:
            return None
        return DraftVerifier(
            draft,
            self.opened,
            engine=self.engine,
            run=self.run_pass,
            read_one=self._logits,
        )

    def check_logits(self, ids: torch.Tensor, logits: torch.Tensor) -> None:
        """Raise NotFinite, traced, where logits [..., V] that a pass over ids [1, S] gave are NaN
        or infinite."""
        if not bool(logits.max() < float("inf")):
            raise self.traced(NotFinite(ids, self.opened.dtype))

    def traced(self, error: NotFinite) -> NotFinite:
        """Return the error with the name of the module or expert that gave the first number that is
        not finite. It is found by one more pass over the error's tokens, which no batch is charged
        for."""
        steps = self.engine.steps
        charged = steps.on_plan
        steps.on_plan = None
        try:
            return NotFinite(
                error.ids, error.dtype, first_place(self.opened, lambda: self.forward(error.ids))
            )
        finally:
            steps.on_plan = charged

    def new_requests(self, count: int) -> int:
        """Number the rows of coming passes as `count` new requests, and return the number of the
        first. Raises BadUsage once the session is closed."""
        with self.lock:
            self._check_open()
            if self.reconfiguration:
                self.reconfiguration.between_requests()
            first = self._next_request
            self.watcher.first_request = first
            self._next_request += count
            return first

    def _lay_out(self, fast: FastTier) -> None:
        """Go on with an empty fast tier that is split differently, within the same budget."""
        self.engine.release_slots()
        try:
            # The budget has no room for the old slots beside the new ones.
            self.parts = replace(self.parts, fast=fast, slots=Slots((), self.parts.devices))
            self.parts = replace(self.parts, slots=lay_out_slots(self.parts))
        except BaseException:
            self._is_closed = True  # without slots nothing can run
            raise

    # Counters and conditions

    @property
    def num_passes(self) -> int:
        """Number of passes since the session was opened; those before a `fold` count as one."""
        return len(self.controller.counters.passes)

    def effort(self, *, first_pass: int = 0) -> Effort:
        """Return the counters and the exposed stall of the passes from `first_pass` on, by default
        of all."""
        return Effort.of(self.charge_since(first_pass))

    def charge_since(self, first_pass: int, *, begin_s: float = 0.0) -> Charge:
        """Return what the passes from `first_pass` on took, and the seconds since `begin_s`."""
        return Charge(
            self.controller.counters.sum(first_pass=first_pass),
            exposed_s=sum(self.engine.stall_s[first_pass:]),
            seconds=time.perf_counter() - begin_s,
            passes=self.num_passes - first_pass,
        )

    def fold(self) -> None:
        """Count all passes so far as one, which keeps the counters of an endless run small."""
        with self.lock:
            self.engine.fold()

    def record(self) -> Recorder:
        """Record every step from here on, with all that a replay needs."""
        recorder = Recorder()
        self.watcher.see_probabilities()
        self.watcher.see_embeddings()
        observe(self.watcher, recorder)
        return recorder

    def receipt(self) -> Receipt:
        """Return everything that is really in force, by name."""
        said = receipt(
            self.parts, self.reconfiguration, coding=self.kv_coding, fallbacks=self.fallbacks
        )
        return Receipt(said | self.drafting())

    def drafting(self) -> dict[str, object]:
        """Return the part of the receipt that says what drafting did."""
        return {"draft": self.verifier.receipt() if self.verifier else {}}

    def _row(self) -> dict[str, object]:
        """Return the receipt's most told entries, and the hit rate so far."""
        said = self.receipt()
        names = ("model", "preset", "device", "slots", "experts")
        return {name: said[name] for name in names} | {"hit rate": self.effort().hit_rate}

    def __repr__(self) -> str:
        return f"<Session {self._row()}>"

    def _repr_html_(self) -> str:
        row = self._row()
        return html_table(row, [row.values()])
