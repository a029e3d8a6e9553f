"""Decoded tokens as CUDA graphs: the model's own forward is captured once, and replayed token by
token.

A token is one graph, also where the host decides: the graph then waits for its answers. Where an
answer cannot say all that may have to be done, a graph ends at each layer's router, and the next
one begins behind its experts.
"""

from collections.abc import Callable
from functools import partial, wraps

import torch

from runtime.backends.streams import new_stream
from runtime.devices import wait_for_compute
from runtime.engine.captured_pass import CapturedPass, Launch
from runtime.engine.device_road import DeviceRoad
from runtime.engine.fixed_past import FixedPast, reason_not_lodged, twin_of
from runtime.engine.host_road import HostRoad
from runtime.engine.one_token import OneToken
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


class CapturedTokens:
    """Replaces the model's `forward` from `install` to `uninstall`. Hooks of the model itself are
    called as before. The work of router hooks is part of a graph; no other hook of an inner module
    is called.

    `launch` replaces a layer's experts while a pass is captured, and is None otherwise. `why_not`
    is the reason why the last token could not be captured. After a capture that fails no other one
    is tried. `forget` is called where the host fails while a graph waits for it.
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
        self.why_not: str | None = None
        self.num_tokens = self.num_captures = 0
        self._opened = opened
        self._model = opened.model
        self._forget = forget
        self._hosted: HostRoad | None = None
        self._steps = steps
        self._road = road
        self._watcher = watcher
        self._is_off = False
        self._has_tables = bool(tables_of(opened.model))
        self._past: FixedPast | None = None
        self._captured: CapturedPass | None = None
        self._key: tuple | None = None  # under which it was captured
        self._seen: tuple | None = None  # of the last token that was not
        self._stream = new_stream(opened.model.device)
        with torch.inference_mode(False):  # a session forwards within it, and `generate` without
            self._ids = torch.zeros(1, 1, dtype=torch.int64, device=opened.model.device)
            self._positions = torch.zeros_like(self._ids)

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
        self._past = self._captured = self._key = self._seen = self._hosted = None

    def receipt(self) -> dict[str, object]:
        """Return the number of tokens that were replayed, the number of graphs of each, who knows
        their slots (`road`), the number of captures, and `why_not`."""
        graphs = self._captured.num_graphs if self._captured else 0
        return {
            "tokens": self.num_tokens,
            "graphs": graphs,
            "road": self._key[0] if self._key else None,
            "captures": self.num_captures,
            "why_not": self.why_not,
        }

    def queue_again(self) -> None:
        """Queue the last token once more, where its graph asks nothing of the host: for
        measurements. Nothing is counted."""
        self._past.count(self._past.num_tokens - 1)
        self._captured.replay(_experts)

    def _run(self, *args: object, **named: object) -> object:
        is_off = self._is_off or self._steps.is_drafting or torch.is_grad_enabled()
        token = None if is_off else OneToken.of(args, named)
        if token is None or not self._is_ready(token):
            return self._forward(*args, **named)
        return self._replay(token)

    def _is_ready(self, token: OneToken) -> bool:
        """Return whether there is a graph for this token, and its keys and values lie where the
        graph reads them. Captures the graph and copies the sequence there if that can be done."""
        way, self.why_not = self._way(token)
        if way is None:
            return False
        key = (way, self._watcher.wanted)
        if key != self._key or not self._past.has_room(token.past, token.num_tokens):
            if key != self._seen:  # a first token compiles kernels, and makes the host's buffers
                self._seen = key
                return False
            self._show_embedded(token)
            if not self._capture(key, token):
                return False
        if not self._past.holds(token.past):
            if not token.sees_all:
                self.why_not = "the sequence is padded"
                return False
            self._past.lodge(token.past, token.num_tokens)
        return True

    def _way(self, token: OneToken) -> tuple[str | None, str | None]:
        """Return where the token's slots are known (device, resident, host or seams) and None; or
        None and the reason why the token cannot be captured."""
        reason = (
            f"forwards are given {', '.join(token.others)}"
            if token.others
            else reason_not_lodged(token.past)
        )
        if self._has_tables:  # each token's rows are known once its graph would run already
            reason = "rows of tables are read from files for each token"
        if reason is None and self._road and (self._watcher.on_step or self._steps.on_plan):
            reason = "the host sees every step"
        if reason is not None:
            return None, reason
        if self._road:
            return _DEVICE, None
        if self._steps.is_settled():
            return _RESIDENT, None
        return (_HOST if HostRoad.suits(self._steps) else _SEAMS), None

    def _capture(self, key: tuple, token: OneToken) -> bool:
        """Capture a token's pass without computing it. Returns False where that fails: nothing has
        happened then."""
        seen = self._seen
        self.drop()
        launch, rehearsed, end = self._on_device, _nothing, _end
        hosted = None
        if key[0] is _RESIDENT:
            launch = self._resident
        elif key[0] is _SEAMS:
            launch = None
        elif key[0] is _DEVICE:
            end = self._road.queue_counters
        try:
            with torch.inference_mode(False), torch.no_grad(), self._watcher.captured(self._ids):
                if key[0] is _HOST:
                    hosted = HostRoad(self._opened, self._steps, self._watcher)
                    launch, rehearsed = hosted.launch, hosted.rehearse
                captured = CapturedPass(self._watcher, launch)
                past = FixedPast(token.past, _room(token.num_tokens), self._ids.device)
                self._put(token)
                own = {
                    "input_ids": self._ids,
                    "position_ids": self._positions,
                    "past_key_values": past.cache,
                }
                forward = partial(self._forward, **own, use_cache=True)
                self.launch = rehearsed
                _rehearse(self._forward, forward, past, token)
                self.launch = captured.experts
                captured.capture(forward, self._stream, end)
            _check_output(captured.output)
        except (
            Exception
        ) as error:  # of the model's own code, of the driver, or of too little memory
            first = str(error).strip().partition("\n")[0]
            self._is_off = True
            self.why_not = f"{type(error).__name__}: {first}"[:200]
            return False
        finally:
            self.launch = None
        self._past = past
        self._captured = captured
        self._hosted = hosted
        self._key = key
        self._seen = seen
        self.num_captures += 1
        return True

    def _show_embedded(self, token: OneToken) -> None:
        """Call the embedding, so that its hook shows the host the embeddings that a policy or an
        observer asks for: once a pass, and not from within a graph."""
        if self._watcher.sees_embeddings:
            self._model.get_input_embeddings()(token.ids)

    def _put(self, token: OneToken) -> None:
        """Write a token to the addresses from which graphs read it."""
        self._ids.copy_(token.ids)
        if token.positions is None:
            self._positions.fill_(token.num_tokens)
        else:
            self._positions.copy_(token.positions)

    def _replay(self, token: OneToken) -> object:
        if self._hosted:
            self._hosted.begin_token()
        self._show_embedded(token)
        self._past.count(token.num_tokens)
        self._put(token)
        if self._road:
            self._road.begin_token()
        self._captured.replay(_experts)
        if self._road:
            self._road.replayed()
        elif self._hosted:
            self._answer(self._hosted)
        elif self._key[0] is _RESIDENT:
            self._steps.count_settled(self._captured.chosen)
        self._past.num_tokens += 1
        self.num_tokens += 1
        own = {
            name: value.clone()
            for name, value in self._captured.output.items()
            if name != "past_key_values"
        }
        return type(self._captured.output)(past_key_values=token.past, **own)

    def _answer(self, hosted: HostRoad) -> None:
        """Answer the graph that is queued; where that fails, it ends before anything else does."""
        try:
            hosted.answer_all()
        except BaseException:
            hosted.stop()
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
    model: Callable[..., object], forward: Callable[[], object], past: FixedPast, token: OneToken
) -> None:
    """Compute the token without experts, once as it was asked for and once from memory at fixed
    addresses. Libraries thereby make the preparations that a capture must not make. Raises
    RuntimeError where the logits of both differ."""
    asked = {"input_ids": token.ids, "position_ids": token.positions, "use_cache": True}
    theirs = model(**asked, past_key_values=twin_of(token.past)).logits.float()
    copied = twin_of(token.past)
    past.lodge(copied, token.num_tokens)
    past.count(token.num_tokens)
    ours = forward().logits
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    if not error <= _ALIKE.get(ours.dtype, _COARSE):
        raise RuntimeError(
            f"from keys and values at fixed addresses its logits differ by {error:.1e}"
        )


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
