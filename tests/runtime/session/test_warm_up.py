"""Opening a session on a GPU runs a prompt and a token, of which nothing is left. Here a CPU stands
for the GPU."""

import pytest
import torch

from runtime.backends.torch_backend import TorchBackend
from runtime.control.cache import ABSENT
from runtime.model.open import open_model
from runtime.session.generation import warm_up as module
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint

SETTINGS = Settings(preset="on-demand", budget="25%", link="50GB/s", window="1MB")


def test_a_prompt_and_a_token_leave_nothing(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[tuple[int, int]] = []
    begin = TorchBackend.begin
    add = TorchBackend.add

    def noted(self: TorchBackend, places: list) -> None:
        computed.append((len(self._tokens), len(places)))
        add(self, places)

    def begun(self: TorchBackend, tokens: object) -> TorchBackend:
        self._tokens = tokens.hidden
        return begin(self, tokens)

    opened = open_model(str(checkpoint("olmoe")))
    ids = torch.arange(3, 12)[None]
    with Session(opened, SETTINGS) as session:
        expected = session.forward(ids).logits
    with monkeypatch.context() as patched:
        patched.setattr(module, "compiles_late", lambda device: True)
        patched.setattr(TorchBackend, "begin", begun)
        patched.setattr(TorchBackend, "add", noted)
        session = Session(opened, SETTINGS)
    with session:
        (prompt, several), (token, few) = computed
        assert (prompt, token) == (128, 1) and several > few == opened.shape.top_k
        assert session.num_passes == 0 and (session.controller.cache.state == ABSENT).all()
        assert all("forward" not in layer.experts.__dict__ for layer in opened.layers)
        assert torch.equal(session.forward(ids).logits, expected)
        session.validate()


def test_no_slot_is_used_where_experts_are_cut(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "compiles_late", lambda device: True)
    opened = open_model(str(checkpoint("olmoe")))
    with Session(opened, Settings(preset="moepic", budget="50%", window="1MB")) as session:
        assert session.parts.fast.split is not None and not module._usable(session.parts)
        assert session.num_passes == 0
