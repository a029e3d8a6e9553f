"""Observes a model's routers by hooks and makes the steps that policies see, with one copy from
device to host each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from artifacts.routing.expert_maps import mean_rows
from artifacts.traces.trace import DECODE, PREFILL
from runtime.backends.host_copy import HostCopy, Letter, real_rows
from runtime.engine.fitted_predictor import Predictor
from runtime.engine.router_ahead import RouterAhead, carried_on, reason_not_asked, routers_ahead
from runtime.model.open import MoeModel
from runtime.policies.step import Opening, Step, last_tokens


@dataclass(slots=True)
class _Routed:
    """A router's input, its logits and the tensor that it carries to the next router, kept until
    its experts are called."""

    x: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    carried: torch.Tensor | None = None


@dataclass(slots=True)
class _Pass:
    """The pass under way."""

    phase: int
    requests: np.ndarray  # of each row that is a token
    last: np.ndarray  # the row of each request's last token
    prompts: np.ndarray | None = None  # which rows are of prompts, where others are decoded
    drafted: np.ndarray | None = None  # which rows are drafts
    foretold: np.ndarray | None = None  # [T, L, K] as in `Step`
    # [B, S] of all rows, until the last layer where routers are hooked
    ids: torch.Tensor | None = None
    embedding: np.ndarray | None = None  # [R, H], each request's mean
    # The output of the first routers for the next ones: of as many layers as are predicted ahead.
    carried: list[torch.Tensor | None] = field(default_factory=list)


class Watcher:
    """Makes a `Step` of every layer.

    `on_pass` is called with the request of each row of a pass, `on_step` with every step,
    `on_opening` once the input of a pass is embedded. `first_request` is the number of the first
    request of the coming passes. With `decodes` these passes count as decoding, however many tokens
    they have. `token_requests`, if given, has the request of each token of the next pass, in place
    of one request for each row; the tokens of a request stand together. `drafted`, if given beside
    it, says which of these are drafts, and `on_settle` is called once it is known which of a pass's
    tokens are rejected, and which were read in vain: these, or to be read again. `foretold` is what
    drafts tell of the next pass alone, as in `Step`; `num_foretold` counts such passes. `rows` are
    the rows of the pass under way that are tokens, None: all. With `is_watching` routers are
    hooked, with `sees_embeddings` the embedding.
    """

    def __init__(self, opened: MoeModel) -> None:
        self.on_step: Callable[[Step], None] | None = None
        self.on_pass: Callable[[np.ndarray], None] | None = None
        self.on_opening: Callable[[Opening], None] | None = None
        self.on_settle: Callable[[np.ndarray, np.ndarray], None] | None = None
        self.first_request = 0
        self.decodes = False
        self.token_requests: np.ndarray | None = None
        self.drafted: np.ndarray | None = None
        self.foretold: np.ndarray | None = None
        self.num_foretold = 0
        self.rows: np.ndarray | None = None
        self._opened = opened
        self._to_host = HostCopy(opened.model.device)
        self._wants_probabilities = self.sees_embeddings = False
        self._distance = 0
        self.predictor: Predictor | None = None
        self._routed = [_Routed() for _ in opened.layers]
        self._ahead: list[RouterAhead] = []  # of all layers, once predictions are seen
        self._pass = _Pass(PREFILL, np.zeros(0, np.int32), np.zeros(0, np.int64))
        self._letter: Letter | None = None  # from which the next step is made
        self._pass_index = -1
        self._newest = -1  # of the requests that were seen
        self._handles: list = []
        self.is_watching = False

    def see_probabilities(self) -> None:
        """Make steps carry the routers' probabilities from here on."""
        self._wants_probabilities = True
        self._watch_routers()

    def see_embeddings(self) -> None:
        """Make steps carry the mean input embeddings of their pass from here on."""
        if not self.sees_embeddings:
            self.sees_embeddings = True
            self._watch_embedding()

    def see_predictions(self, distance: int = 1, predictor: Predictor | None = None) -> None:
        """Make steps carry predictions from here on: the distributions that the routers of the next
        `distance` layers give for this router's input, and the fitted predictor's, if there is one.
        The routers' predictions are left out where there is a `reason_not_asked`."""
        if distance and reason_not_asked(self._opened) is None:
            self._distance = max(self._distance, distance)
            self._ahead = self._ahead or routers_ahead(self._opened)
        self.predictor = predictor or self.predictor
        self._watch_routers()

    def stop(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.is_watching = self.sees_embeddings = False

    def begin_pass(self, args: tuple, kwargs: dict) -> int:
        """Note the requests whose tokens the model is given. Returns the number of tokens."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        batch, length = (ids if ids is not None else kwargs["inputs_embeds"]).shape[:2]
        requests = self.token_requests
        self.rows = None
        if requests is None:
            requests = np.arange(
                self.first_request, self.first_request + batch, dtype=np.int32
            ).repeat(length)
            self.rows = real_rows(kwargs.get("attention_mask"), batch, length)
            requests = requests if self.rows is None else requests[self.rows]
        last = last_tokens(requests)
        phase, prompts = (
            self._phases(requests, last) if length > 1 and not self.decodes else (DECODE, None)
        )
        self._pass = _Pass(phase, requests, last, prompts, self.drafted, self.foretold, ids)
        self.num_foretold += self.foretold is not None
        self.foretold = None
        self._letter = None
        self._pass_index += 1
        if self.on_pass is not None:
            self.on_pass(requests)
        return len(requests)

    def _phases(self, requests: np.ndarray, last: np.ndarray) -> tuple[int, np.ndarray | None]:
        """Return the phase of a pass, and which tokens [T] are of prompts if others are decoded.
        Tokens are of prompts if their request has several tokens in this pass, or was not seen
        before."""
        counts = np.diff(last, prepend=-1)
        is_prompt = (counts > 1) | (requests[last] > self._newest)
        if self.drafted is not None:
            is_prompt &= ~self.drafted[last]
        self._newest = max(self._newest, int(requests.max(initial=-1)))
        if is_prompt.all():
            return PREFILL, None
        return (PREFILL, np.repeat(is_prompt, counts)) if is_prompt.any() else (DECODE, None)

    @property
    def num_drafts(self) -> int:
        """Number of drafts in the pass under way."""
        return 0 if self._pass.drafted is None else int(self._pass.drafted.sum())

    def open_pass(self, kwargs: dict) -> None:
        """Tell of a pass that has begun, unless that waits for its embedding; note its input where
        it is given embeddings in place of ids."""
        if not self.sees_embeddings:
            self._open()
        elif self._pass.ids is None:
            self._embed(kwargs["inputs_embeds"])

    def step(self, layer: int, ids: torch.Tensor | None, weights: torch.Tensor | None) -> Step:
        """Return one layer as policies see it, with ids and weights [T, K], or by the letter that
        is expected. This is the only copy of a step to the host."""
        letter = self._letter
        self._letter = None
        if letter:
            arrays = letter.read()
        else:
            is_watching = self.is_watching
            arrays = self._to_host(
                self._to_be_seen(layer, ids, weights) if is_watching else [ids, weights]
            )
        if self.is_watching:
            self._forget(layer)
        if self.rows is not None:
            arrays = [array[self.rows] for array in arrays]
        selected, weights_host, *rest = arrays
        probabilities = rest.pop(0) if self._wants_probabilities else None
        predicted, learned = (
            (_stacked(rest[: self._distance]), _stacked(rest[self._distance :]))
            if rest
            else (None, None)
        )
        step = Step(
            pass_index=self._pass_index,
            phase=self._pass.phase,
            layer=layer,
            selected=selected,
            weights=weights_host,
            probabilities=probabilities,
            predicted=predicted,
            last=self._pass.last,
            learned=learned,
            embedding=self._pass.embedding,
            requests=self._pass.requests,
            prompts=self._pass.prompts,
            drafted=self._pass.drafted,
            foretold=self._pass.foretold,
        )
        if self.on_step is not None:
            self.on_step(step)
        return step

    def chosen(self, ids: torch.Tensor, weights: torch.Tensor) -> list[np.ndarray]:
        """Return ids and weights [T, K] on the host, of a step without observers."""
        return self._to_host([ids, weights])

    def foreseen(self, layer: int) -> torch.Tensor:
        """Return the distribution [T, E] that the next layer's router gives for this one's input,
        where the host sees nothing else of the step."""
        nearest, *_ = self._predictions(layer, self._routed[layer])
        self._forget(layer)
        return nearest

    @property
    def wanted(self) -> tuple[object, ...]:
        """The settings that decide the contents of steps besides ids and weights."""
        return self._wants_probabilities, self._distance, self.predictor, self.is_watching

    @contextmanager
    def captured(self, ids: torch.Tensor) -> Iterator[None]:
        """Take the pass, while it is captured, for one of these `ids` [1, T], whose address is
        fixed."""
        before = self._pass.ids
        self._pass.ids = ids
        try:
            yield
        finally:
            self._pass.ids = before
            self._pass.carried.clear()

    def send(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> Letter:
        """Make the graph that is being captured send the tensors from which a step of this layer is
        made."""
        letter = self._to_host.send(self._to_be_seen(layer, ids, weights))
        self._forget(layer)
        return letter

    def expect(self, letter: Letter) -> None:
        """Make the next step of this letter, which a graph sends."""
        self._letter = letter

    def _to_be_seen(
        self, layer: int, ids: torch.Tensor, weights: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the tensors of a layer that the host must see, [T, *] each."""
        routed = self._routed[layer]
        tensors = [ids, weights]
        if self._wants_probabilities:
            tensors.append(self._opened.layers[layer].distribution(routed.logits))
        if self._distance:
            tensors += self._predictions(layer, routed)
        if self.predictor:
            tensors += self.predictor.ahead(layer, routed.x)
        return tensors

    def _forget(self, layer: int) -> None:
        """Drop the tensors that were kept of a layer: those of all layers of a long prompt would
        fill a GPU."""
        routed = self._routed[layer]
        routed.x = routed.logits = routed.carried = None
        if layer == len(self._routed) - 1:
            self._pass.ids = None
            self._pass.carried.clear()

    def _watch_routers(self) -> None:
        """Hook the routers, once. Only when asked: a hook costs a layer of one token some five
        microseconds."""
        if not self.is_watching:
            self.is_watching = True
            for layer in self._opened.layers:
                self._handles.append(
                    layer.gate.register_forward_hook(self._keep_routing(layer.index))
                )

    def _watch_embedding(self) -> None:
        def embed(embedding: nn.Module, args: tuple, output: torch.Tensor) -> None:
            self._embed(output)

        self._handles.append(self._opened.model.get_input_embeddings().register_forward_hook(embed))

    def _embed(self, given: torch.Tensor) -> None:
        """Copy the input of the pass [B, S, H] to the host at once, apart from the steps, so that a
        search by it runs while the first layer attends. Does so once a pass: anything embedded
        later is not its input."""
        if self._pass_index < 0 or self._pass.embedding is not None:
            return
        tokens = given.detach().flatten(0, -2).float().cpu().numpy()
        tokens = tokens if self.rows is None else tokens[self.rows]
        self._pass.embedding = np.array(mean_rows(tokens, self._pass.last))
        self._open()

    def _open(self) -> None:
        if self.on_opening is not None:
            now = self._pass
            self.on_opening(Opening(self._pass_index, now.phase, now.embedding, now.foretold))

    def _keep_routing(self, index: int) -> Callable:
        routed = self._routed[index]

        def hook(gate: nn.Module, args: tuple, output: tuple) -> None:
            routed.x = args[0]
            routed.logits = output[0]
            routed.carried = carried_on(output)

        return hook

    def _predictions(self, layer: int, routed: _Routed) -> list[torch.Tensor]:
        """Return the distributions [T, E] of each of the next D routers for this router's input.
        The ids of the next pass are not known yet, nor the tensors that its routers carry: routers
        that read them are asked with those of this pass."""
        if layer < self._distance:
            self._pass.carried.append(routed.carried)
        carried = routed.carried
        answers = []
        for ahead in range(layer + 1, layer + 1 + self._distance):
            turns, index = divmod(ahead, len(self._ahead))
            if turns:
                carried = self._pass.carried[index - 1] if index else None
            answer = self._ahead[index].answer(routed.x, self._pass.ids, carried)
            carried = answer.carried
            answers.append(answer.p)
        return answers


def _stacked(ahead: list[np.ndarray]) -> np.ndarray | None:
    """Join the distributions of D layers, each [T, E], to one array [T, D, E]; None for no
    layer."""
    if len(ahead) == 1:
        return ahead[0][:, None]
    return np.stack(ahead, axis=1) if ahead else None
