"""Decoded tokens as CUDA graphs: the model's own forward is captured once, and replayed token by
token; that of a pass which verifies drafts once for each number of tokens.

A pass is one graph, also where the host decides: the graph then waits for its answers. Where an
answer cannot say all that may have to be done, a token's graph ends at each layer's router, and the
next one begins behind its experts; passes of several tokens are launched kernel by kernel there.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps

import torch

from runtime.backends.streams import new_pool, new_stream
from runtime.devices import wait_for_compute
from runtime.engine.captured_pass import CapturedPass, Launch
from runtime.engine.device_road import DeviceRoad
from runtime.engine.fixed_past import FixedPast, reason_not_lodged, twin_of
from runtime.engine.host_road import HostDesk, HostRoad
from runtime.engine.next_tokens import NextTokens
from runtime.engine.routers import Watcher
from runtime.engine.step import StepExecutor
from runtime.model.files.row_table import tables_of
from runtime.model.open import MoeLayer, MoeModel

# tokens that there is room for, a power of two: a chat outgrows it rarely
_LEAST = 512
_SPARE = 128
# largest difference, relative to the largest logit, when sums run in another order
_ALIKE = {torch.float32: 1e-4}
_COARSE = 5e-2
# where the slots of a token's experts are known
_DEVICE = "device"
_RESIDENT = "resident"
_HOST = "host"
_SEAMS = "seams"  # the host too, between graphs


@dataclass(slots=True, eq=False)
class _Graph:
    """A pass that was captured under a key, with the addresses from which it reads tokens and
    positions [1, T], and with the `desk` at which the host answers it, if it does."""

    key: tuple
    captured: CapturedPass
    ids: torch.Tensor
    positions: torch.Tensor
    desk: HostDesk | None


class CapturedTokens:
    """Replaces the model's `forward` from `install` to `uninstall`. Hooks of the model itself are
    called as before. The work of router hooks is part of a graph; no other hook of an inner module
    is called.

    Up to `most_tokens` tokens are captured where all but the first are drafts. `launch` replaces a
    layer's experts while a pass is captured, and is None otherwise. `why_not` is the reason why the
    last token could not be captured, `wide_why_not` the same by the number of several tokens. After
    a capture that fails no other one of as many tokens is tried; none at all after one of a single
    token. `forget` is called where the host fails while a graph waits for it.
    """

    def __init__(
        self,
        opened: MoeModel,
        steps: StepExecutor,
        road: DeviceRoad | None,
        watcher: Watcher,
        forget: Callable[[], None],
    ) -> None:
        self.launch: Launch | None = None
        self.most_tokens = 1
        self.why_not: str | None = None
        self.wide_why_not: dict[int, str] = {}
        self.num_tokens = self.num_captures = 0
        self.num_passes: Counter[int] = Counter()  # replayed, by their number of several tokens
        self._opened = opened
        self._model = opened.model
        self._forget = forget
        self._hosted: HostRoad | None = None  # of the graphs that the host answers
        self._steps = steps
        self._road = road
        self._watcher = watcher
        self._is_off = False
        self._has_tables = bool(tables_of(opened.model))
        self._past: FixedPast | None = None
        self._pool: object = None  # memory of all graphs: one is replayed at a time
        self._graphs: dict[int, _Graph] = {}  # by the number of tokens
        self._last: _Graph | None = None  # that was replayed
        self._seen: dict[int, tuple] = {}  # keys of passes that were not captured yet
        self._failed: set[int] = set()
        self._stream = new_stream(opened.model.device)

    def install(self) -> None:
        self._forward: Callable = self._model.forward

        @wraps(self._forward)  # `generate` looks at the signature
        def forward(*args: object, **named: object) -> object:
            return self._run(*args, **named)

        self._model.forward = forward

    def uninstall(self) -> None:
        self.drop()
        del self._model.forward

    def stop(self) -> None:
        """Launch tokens one by one from here on."""
        self.drop()
        self._is_off = True
        self.why_not = "it was stopped"

    def drop(self) -> None:
        """Drop the captured graphs: addresses may have changed. The next token is launched one by
        one."""
        if self._past is not None:
            self._past.leave()
        self._past = self._pool = self._last = self._hosted = None
        self._graphs.clear()
        self._seen.clear()

    def receipt(self) -> dict[str, object]:
        """Return the number of tokens that were replayed alone, the number of graphs of each, who
        knows their slots (`road`), the number of captures, `why_not`; and, once several tokens were
        to be read at once, the passes that were replayed by their number of tokens (`widths`), and
        `wide_why_not`."""
        last = self._last
        told = {
            "tokens": self.num_tokens,
            "graphs": last.captured.num_graphs if last else 0,
            "road": last.key[0] if last else None,
            "captures": self.num_captures,
            "why_not": self.why_not,
        }
        if self.num_passes or self.wide_why_not:
            told |= {"widths": dict(self.num_passes), "wide_why_not": dict(self.wide_why_not)}
        return told

    def queue_again(self) -> None:
        """Queue the last pass once more, where its graph asks nothing of the host: for
        measurements. Nothing is counted. No token of it may have been forgotten."""
        self._past.count(self._past.num_tokens - self._last.ids.shape[1])
        self._last.captured.replay(_experts)

    def _run(self, *args: object, **named: object) -> object:
        is_off = self._is_off or self._steps.is_drafting or torch.is_grad_enabled()
        most = 1 if self._watcher.drafted is None else self.most_tokens
        tokens = None if is_off else NextTokens.of(args, named, most)
        if tokens is None or not self._is_ready(tokens):
            return self._forward(*args, **named)
        return self._replay(tokens)

    def _is_ready(self, tokens: NextTokens) -> bool:
        """Return whether there is a graph for these tokens, and their keys and values lie where it
        reads them. Captures the graph and copies the sequence there if that can be done."""
        count = tokens.count
        if count in self._failed:
            return False
        way, reason = self._way(tokens)
        self._note(count, reason)
        if way is None:
            return False
        key = (way, self._watcher.wanted)
        graph = self._graphs.get(count)
        if graph is None or graph.key != key or not self._has_room(tokens):
            if key != self._seen.get(count):
                self._seen[count] = key  # a first pass compiles kernels, and makes buffers
                return False
            self._show_embedded(tokens)
            if not self._capture(key, tokens):
                return False
        if not self._past.holds(tokens.past):
            if not tokens.sees_all:
                self._note(count, "the sequence is padded")
                return False
            self._past.lodge(tokens.past, tokens.num_tokens)
        return True

    def _note(self, count: int, reason: str | None) -> None:
        """Note why so many tokens are not captured; None: they are."""
        if count == 1:
            self.why_not = reason
        elif reason:
            self.wide_why_not[count] = reason
        else:
            self.wide_why_not.pop(count, None)

    def _has_room(self, tokens: NextTokens) -> bool:
        return self._past is not None and self._past.has_room(
            tokens.past, tokens.num_tokens, tokens.count
        )

    def _way(self, tokens: NextTokens) -> tuple[str | None, str | None]:
        """Return where the tokens' slots are known (device, resident, host or seams) and None; or
        None and the reason why the tokens cannot be captured."""
        count = tokens.count
        reason = (
            f"forwards are given {', '.join(tokens.others)}"
            if tokens.others
            else reason_not_lodged(tokens.past, count)
        )
        if self._has_tables:  # each token's rows are known once its graph would run already
            reason = "rows of tables are read from files for each token"
        if reason is None and self._road:
            sees = self._watcher.on_step or self._steps.on_plan
            reason = "the host sees every step" if sees else self._road.reason_not(count)
        if reason is not None:
            return None, reason
        if self._road:
            return _DEVICE, None
        if self._steps.is_settled():
            return _RESIDENT, None
        if HostRoad.suits(self._steps, count):
            return _HOST, None
        return (_SEAMS, None) if count == 1 else (None, "the host acts between graphs")

    def _capture(self, key: tuple, tokens: NextTokens) -> bool:
        """Capture a pass without computing it. Returns False where that fails: nothing has happened
        then."""
        seen = dict(self._seen)
        if not self._has_room(tokens):
            self.drop()
        try:
            with torch.inference_mode(False), torch.no_grad():
                graph, past = self._captured(key, tokens)
            _check_output(graph.captured.output)
        except (
            Exception
        ) as error:  # of the model's own code, of the driver, or of too little memory
            first = str(error).strip().partition("\n")[0]
            self._is_off = tokens.count == 1
            self._failed.add(tokens.count)
            self._note(tokens.count, f"{type(error).__name__}: {first}"[:200])
            return False
        finally:
            self.launch = None
        self._past = past
        self._graphs[tokens.count] = graph
        self._seen = seen
        self.num_captures += 1
        return True

    def _captured(self, key: tuple, tokens: NextTokens) -> tuple[_Graph, FixedPast]:
        """Return the graph of a pass, and the memory that it reads. Raises what capturing does."""
        launch, rehearsed, end = self._on_device, _nothing, _end
        desk = None
        if key[0] is _RESIDENT:
            launch = self._resident
        elif key[0] is _SEAMS:
            launch = None
        elif key[0] is _DEVICE:
            end = self._road.queue_counters
        elif key[0] is _HOST:
            self._hosted = self._hosted or HostRoad(self._opened, self._steps, self._watcher)
            desk = self._hosted.desk(tokens.count)
            launch, rehearsed = desk.launch, desk.rehearse
        self._pool = self._pool or new_pool()
        captured = CapturedPass(self._watcher, launch, self._pool)
        ids = tokens.ids.clone()
        past = self._past
        if past is None:
            room = _room(tokens.num_tokens + tokens.count - 1)
            past = FixedPast(tokens.past, room, ids.device, keeps_all=self.most_tokens > 1)
        graph = _Graph(key, captured, ids, torch.zeros_like(ids), desk)
        _put(graph, tokens)
        own = {"input_ids": ids, "position_ids": graph.positions, "past_key_values": past.cache}
        forward = partial(self._forward, **own, use_cache=True)
        with self._watcher.captured(ids):
            self.launch = rehearsed
            _rehearse(self._forward, forward, past, tokens)
            self.launch = captured.experts
            captured.capture(forward, self._stream, end)
        return graph, past

    def _show_embedded(self, tokens: NextTokens) -> None:
        """Call the embedding, so that its hook shows the host the embeddings that a policy or an
        observer asks for: once a pass, and not from within a graph."""
        if self._watcher.sees_embeddings:
            self._model.get_input_embeddings()(tokens.ids)

    def _replay(self, tokens: NextTokens) -> object:
        self._last = graph = self._graphs[tokens.count]
        captured = graph.captured
        if graph.desk:
            graph.desk.begin_pass()
        self._show_embedded(tokens)
        self._past.count(tokens.num_tokens)
        _put(graph, tokens)
        if self._road:
            self._road.begin_token()
        captured.replay(_experts)
        if self._road:
            self._road.replayed(captured.chosen)
        elif graph.desk:
            self._answer(graph.desk)
        elif graph.key[0] is _RESIDENT:
            self._steps.count_settled(captured.chosen)
        self._past.num_tokens += tokens.count
        if tokens.count == 1:
            self.num_tokens += 1
        else:
            self.num_passes[tokens.count] += 1
        own = {
            name: value.clone()
            for name, value in captured.output.items()
            if name != "past_key_values"
        }
        return type(captured.output)(past_key_values=tokens.past, **own)

    def _answer(self, desk: HostDesk) -> None:
        """Answer the graph that is queued; where that fails, it ends before anything else does."""
        try:
            desk.answer_all()
        except BaseException:
            desk.road.stop()
            wait_for_compute(self._model.device)
            self._forget()
            raise

    def _on_device(
        self, layer: MoeLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        foreseen = self._watcher.foreseen(layer.index) if self._road.prefetches else None
        return self._road.launch(layer.index, hidden, ids, weights, foreseen)

    def _resident(
        self, layer: MoeLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return self._steps.backend.forward_whole(layer.index, hidden, ids, weights)


def _experts(
    layer: MoeLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return layer.experts.moectl_forward(hidden, ids, weights)


def _nothing(
    layer: MoeLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return torch.zeros_like(hidden)


def _end() -> None: ...


def _rehearse(
    model: Callable[..., object],
    forward: Callable[[], object],
    past: FixedPast,
    tokens: NextTokens,
) -> None:
    """Compute the tokens without experts, once as it was asked for and once from memory at fixed
    addresses. Libraries thereby make the preparations that a capture must not make. Raises
    RuntimeError where the logits of both differ."""
    asked = {"input_ids": tokens.ids, "position_ids": tokens.positions, "use_cache": True}
    theirs = model(**asked, past_key_values=twin_of(tokens.past)).logits.float()
    copied = twin_of(tokens.past)
    past.lodge(copied, tokens.num_tokens)
    past.count(tokens.num_tokens)
    ours = forward().logits
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    if not error <= _ALIKE.get(ours.dtype, _COARSE):
        raise RuntimeError(
            f"from keys and values at fixed addresses its logits differ by {error:.1e}"
        )


def _put(graph: _Graph, tokens: NextTokens) -> None:
    """Write tokens to the addresses from which a graph reads them."""
    graph.ids.copy_(tokens.ids)
    if tokens.positions is not None:
        graph.positions.copy_(tokens.positions)
    elif tokens.count == 1:
        graph.positions.fill_(tokens.num_tokens)
    else:
        last = tokens.num_tokens + tokens.count
        torch.arange(tokens.num_tokens, last, out=graph.positions.view(-1))


def _room(num_tokens: int) -> int:
    return max(_LEAST, 1 << (num_tokens + _SPARE - 1).bit_length())


def _check_output(output: object) -> None:
    """Raise TypeError where something other than tensors and the cache would have to be
    returned."""
    others = {name for name, value in output.items() if not isinstance(value, torch.Tensor)} - {
        "past_key_values"
    }
    if others:
        raise TypeError(f"a forward returns {', '.join(sorted(others))} too")
