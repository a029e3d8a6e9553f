"""A budget, a policy, a link, a batch or an optimisation changes a token.

`tests/runtime/session/test_session.py` has every family beside it,
`tests/runtime/model/test_config_fields.py` every field of their configs; `tools/torments/cases` has
logits (`differential`) and requests (`against_generate`) at random.
"""

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest

from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tools.torments.engine_checks import check
from tools.torments.lossless import Model, Request, differs, said

AHEAD = "next_gate:distance=2,overfetch=0.5,through=yes"
CHOSEN = {
    **{
        name: (name, {})
        for name in (
            "on-demand",
            "near",
            "behind",
            "mixtral-offloading",
            "moe-infinity",
            "specmd",
            "horizon",
        )
    },
    "hot experts here, cold ones near": ("monde-static", {}),
    "hot experts here at once, the others fetched": (
        "on-demand",
        {"residency": "hot:migrate=before"},
    ),
    "near, and swapped in": ("monde", {"miss": "cold:swap=0.5"}),
    "some fetched": (
        "on-demand",
        {"prefetch": "next_gate", "eviction": "lfu", "miss": "qstar:ratio=0.5"},
    ),
    "two layers ahead, some fetched": (
        "on-demand",
        {"prefetch": AHEAD, "eviction": "lcp", "miss": "qstar:ratio=0.2"},
    ),
    "two layers ahead, lent": (
        "near",
        {"prefetch": AHEAD, "eviction": "horizon", "miss": "near:ratio=0.3,fill=no"},
    ),
}
PACED = {"link": "300MB/s+5us", "near": "1GB/s", "window": "2KiB"}
WITHOUT = {
    "short cuts where nothing is left to decide": ("steps", "can_skip_planning", False),
    "experts computed together": ("steps.backend", "_batched", None),
}


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Iterator[Model]:
    made = Model(Path(checkpoint("olmoe", "hub", "float32")), "olmoe")
    yield made
    made.opened.store.close()


def compare(session: Session, requests: list[Request]) -> None:
    """Compare bit for bit, with a fast tier filled by the previous request."""
    for request in requests:
        assert not differs(said(session, request), request.logits)
        check(session, "a request")


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("name", CHOSEN)
def test_every_budget_gives_the_plain_models_logits(name: str, scope: str, model: Model) -> None:
    preset, policies = CHOSEN[name]
    for budget in (f"{model.opened.shape.num_layers}x", "50%"):
        with Session(
            model.opened, Settings(preset, policies, budget=budget, scope=scope, **PACED)
        ) as session:
            compare(session, model.requests[1:4])


@pytest.mark.parametrize("name", WITHOUT)
def test_no_optimisation_changes_a_bit(name: str, model: Model) -> None:
    owner, attribute, value = WITHOUT[name]
    for settings in (
        Settings("full"),
        Settings("specmd", budget="50%", link="2GB/s", window="2KiB"),
    ):
        with Session(model.opened, settings) as session:
            part = attrgetter(owner)(session.engine)
            assert hasattr(part, attribute)
            setattr(part, attribute, value)
            compare(session, model.requests[:3])


def test_two_sessions_do_not_share_a_model(model: Model) -> None:
    with Session(model.opened, Settings("full")) as session:
        with pytest.raises(Exception, match="runs in another session"):
            Session(model.opened, Settings(budget="50%"))
        compare(session, model.requests[:1])
    other = open_model(str(model.folder))
    with (
        Session(model.opened, Settings("full")) as first,
        Session(other, Settings(budget="50%")) as second,
    ):
        compare(first, model.requests[:1])
        compare(second, model.requests[:1])
    other.store.close()
