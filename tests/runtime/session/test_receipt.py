"""The receipt says what is in force, and each fallback has its line."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from artifacts.formats.gguf.ggml import GGML
from runtime.control.splits.resplit import NOT_ANEW
from runtime.model.quantised.dense_bits import DenseWidth
from runtime.policies.base import Origin
from runtime.session import receipt as module
from runtime.session.receipt import fallbacks_of, receipt
from runtime.session.settings import EXACT, FUSED

CPU = (torch.device("cpu"),)
GPUS = (torch.device("cuda", 0), torch.device("cuda", 1))


def parts_of(**own: object) -> SimpleNamespace:
    """A session's parts, as far as a receipt reads them."""
    devices = own.pop("devices", CPU)
    settings = {
        "preset": "on-demand",
        "budget": "25%",
        "experts": EXACT,
        "devices": len(devices),
        "scaled_to": None,
        "verify": False,
    }
    config = SimpleNamespace(name_or_path=own.pop("name", "a/model"))
    opened = SimpleNamespace(
        config=config,
        family="olmoe",
        dtype=torch.bfloat16,
        base=16,
        shape=SimpleNamespace(num_keys=16, expert_nbytes=64),
        expert_format="mxfp4, 4.25 bits",
        model=SimpleNamespace(
            device=devices[0],
            parameters=lambda: (torch.zeros(3), torch.zeros(5, device="meta")),
            modules=lambda: (),
        ),
        dense=own.pop("width", None),
        activations=own.pop("activations", None),
        store=SimpleNamespace(layout=own.pop("layout", None)),
        unfollowed=own.pop("unfollowed", ()),
    )
    cache = SimpleNamespace(num_slots=4, shape=opened.shape, shadows=own.pop("resident", None))
    link = SimpleNamespace(conditions=lambda: {"kind": "disk"})
    made = {
        "opened": opened,
        "settings": SimpleNamespace(
            **settings | {key: own.pop(key) for key in settings.keys() & own}
        ),
        "policies": SimpleNamespace(
            fallbacks=["a policy's"],
            matching=None,
            widths=(4,),
            wants={"buddies"},
            prefetch=SimpleNamespace(reads_foretold=False),
        ),
        "origins": {},
        "controller": SimpleNamespace(
            cache=cache, by_device=lambda: [{"hits": number} for number in range(2)]
        ),
        "fused": SimpleNamespace(name="fused", dequantised_layers=lambda opened: ()),
        "is_fused": False,
        "dense": None,
        "threads": SimpleNamespace(num_used=2),
        "scope": "layer",
        "budget": "25%",
        "fast": SimpleNamespace(split=None, holds=lambda shape: False),
        "fast_nbytes": 256,
        "watcher": SimpleNamespace(predictor=None),
        "tiers": SimpleNamespace(pinned_nbytes=0, link=link, near=SimpleNamespace(conditions=dict)),
        "window": 64,
        "memory": {},
        "computed_widths": [],
        "packed_widths": [4],
        "has_trellis": False,
        "shadows": None,
        "engine": SimpleNamespace(
            steps=SimpleNamespace(num_not_landed=3), road=None, captured=None
        ),
        "link": SimpleNamespace(kind="emulated"),
        "devices": devices,
    }
    return SimpleNamespace(**made | own)


@pytest.fixture(autouse=True)
def policies_are_named_by_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLICIES", {})
    monkeypatch.setattr(module.split_solver, "receipt", lambda split, shape: {})
    monkeypatch.setattr(
        module, "tokens_between", lambda asked, split, policies: split is not None and 1
    )


def test_what_is_not_there_leaves_its_line_empty() -> None:
    said = receipt(parts_of(), None, fallbacks=["one"])
    assert [
        said[name]
        for name in ("reconfigured", "replicas", "predictors", "maps", "near", "compiled")
    ] == [{}] * 6
    assert said["model"] == "a/model" and said["dtype"] == "bfloat16" and said["device"] == "cpu"
    assert said["experts_of_a_token"] == "torch" and said["fallbacks"] == ["one"]
    assert (said["slots"], said["experts"], said["expert_bytes"], said["fast_bytes"]) == (
        4,
        16,
        64,
        256,
    )
    assert (said["expert_format"], said["base_bits"]) == ("mxfp4, 4.25 bits", 16)
    assert said["dense"] == {"bytes": 12}
    assert receipt(parts_of(name=""), None, fallbacks=[])["model"] == "olmoe"


def test_it_names_the_runs_whose_artefacts_are_in_force() -> None:
    origins = {
        "buddies": Origin(3, "build-buddies", "ab", "buddies: run 3 is newer than run 2"),
        "replicas": Origin(5, "quantize", "cd", "replicas: run 5 is newer than run 4"),
    }
    parts = parts_of(origins=origins)
    said = {"buddies": {"run": 3, "command": "build-buddies", "data_digest": "ab"}}
    assert receipt(parts, None, fallbacks=[])["artefacts"] == said
    assert fallbacks_of(parts)[1:2] == ["buddies: run 3 is newer than run 2"]
    parts.opened.base = 4
    assert receipt(parts, None, fallbacks=[])["artefacts"].keys() == {"buddies", "replicas"}


def test_what_is_there_has_a_receipt_of_its_own() -> None:
    own = [
        SimpleNamespace(receipt=lambda name=name: {"of": name})
        for name in ("solver", "predictor", "maps", "dense")
    ]
    prefetch = SimpleNamespace(reads_foretold=False)
    matching = SimpleNamespace(
        fallbacks=[], matching=own[2], widths=(), wants=set(), prefetch=prefetch
    )
    parts = parts_of(
        is_fused=True, watcher=SimpleNamespace(predictor=own[1]), policies=matching, dense=own[3]
    )
    said = receipt(parts, own[0], fallbacks=[])
    told = [said[name]["of"] for name in ("reconfigured", "predictors", "maps", "compiled")]
    assert told == ["solver", "predictor", "maps", "dense"]
    assert said["experts_of_a_token"] == "fused"
    few = receipt(parts_of(width=DenseWidth(8, 5, 2)), None, fallbacks=[])["dense"]
    assert few == {"bytes": 12, "bits": 8, "matrices": 5, "as_published": 2}
    rounded = parts_of(activations=8, layout=MIXED, width=DenseWidth(8, 5, 2))
    said = receipt(rounded, None, fallbacks=[])["activations"]
    own = {"bits": 8, "experts": ["Q8_0"], "other_experts": ["Q6_K"], "linear_layers": 5}
    assert said == own and receipt(parts_of(), None, fallbacks=[])["activations"] == {}


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        (GPUS, ["cuda:0", "cuda:1"]),
        (CPU * 2, ["cpu part 0", "cpu part 1"]),
        (CPU, ["cpu part 0"]),
    ],
)
def test_devices_have_their_names_and_parts_of_one_have_numbers(
    devices: tuple, names: list[str]
) -> None:
    said = receipt(parts_of(devices=devices), None, fallbacks=[])["devices"]
    assert said == {name: {"hits": number} for number, name in enumerate(names)}


def test_replicas_are_counted_by_their_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernel_names", lambda device, **kinds: f"of {device}: {kinds}")
    said = receipt(parts_of(computed_widths=[4]), None, fallbacks=[])["replicas"]
    assert said == {
        "slow_tier_bits": ["4"],
        "resident": {},
        "resident_bytes": 0,
        "not_landed": 3,
        "verified": False,
        "code": "packed",
        "kernel": "of cpu: {'has_packed': True, 'has_trellis': False}",
    }
    resident = np.array([2, 2, 3])
    shadows = SimpleNamespace(nbytes=99)
    said = receipt(
        parts_of(computed_widths=[2, 3], resident=resident, shadows=shadows), None, fallbacks=[]
    )["replicas"]
    assert said["resident"] == {"2_bits": 2, "3_bits": 1} and said["resident_bytes"] == 99
    widths = {"computed_widths": [1.25, 2], "has_trellis": True}
    both = parts_of(**widths, resident=np.array([1.25]), shadows=shadows)
    said = receipt(both, None, fallbacks=[])["replicas"]
    assert said["resident"] == {"1_25_bits": 1} and said["code"] == "packed and trellis"


NOT_FUSED = "experts of olmoe on {} are not fused: torch computes"
FROM_DISK = "link disk reads more than a segment for each: use a link from RAM"
LEFT = "dense: 2 linear layers stay as published: too small, or no whole blocks of 32"
AT_USE = "dense: {} bits are dequantised at each use on {}: {}"
UNROUNDED = "activations: experts in Q6_K multiply tokens as computed"
MIXED = SimpleNamespace(
    codes="mixed",
    variants=[
        SimpleNamespace(parts=[SimpleNamespace(format=GGML[name])], format="gguf")
        for name in ("Q8_0", "Q6_K", "Q8_0")
    ],
)
SPLIT = SimpleNamespace(split="split", holds=lambda shape: False)


@pytest.mark.parametrize(
    ("own", "lines"),
    [
        ({}, []),
        ({"activations": 8, "layout": MIXED}, [UNROUNDED]),
        ({"experts": EXACT, "is_fused": True}, []),
        ({"experts": FUSED, "is_fused": True}, []),
        ({"experts": FUSED}, [NOT_FUSED.format("cpu")]),
        ({"experts": FUSED, "devices": GPUS}, [NOT_FUSED.format("2 devices")]),
        ({"devices": CPU * 2}, ["devices: 2 parts of cpu in the place of GPUs"]),
        ({"devices": GPUS}, []),
        ({"devices": GPUS, "fast": SPLIT}, [NOT_ANEW]),
        ({"fast": SPLIT}, []),
        ({"fast": SPLIT, "link": SimpleNamespace(kind="disk")}, [FROM_DISK]),
        ({"fast": SPLIT, "link": SimpleNamespace(kind="cuda")}, []),
        ({"unfollowed": ("beams are not followed",)}, ["beams are not followed"]),
        ({"link": SimpleNamespace(kind="disk")}, []),
        ({"width": DenseWidth(8, 5, 0), "dense": "compiled"}, []),
        ({"width": DenseWidth(8, 5, 2), "dense": "compiled"}, [LEFT]),
        (
            {"width": DenseWidth(8, 5, 0)},
            [AT_USE.format(8, "cpu", "--experts fused multiplies where it lies")],
        ),
        (
            {"width": DenseWidth(4, 5, 0), "devices": GPUS[:1]},
            [AT_USE.format(4, "cuda", "there is no kernel")],
        ),
        (
            {"fast": SimpleNamespace(split=None, holds=lambda shape: True)},
            ["budget 25% holds the whole model: every expert stays resident"],
        ),
    ],
)
def test_each_fallback_has_a_line(own: dict, lines: list[str]) -> None:
    assert fallbacks_of(parts_of(**own)) == ["a policy's", *lines]


@pytest.mark.parametrize(
    ("reason", "lines"),
    [("why", ["decoded tokens are launched one by one, not as CUDA graphs: why"]), (None, [])],
)
def test_tokens_that_are_not_replayed_are_a_fallback(reason: str | None, lines: list[str]) -> None:
    told = {"tokens": 3, "graphs": 1, "captures": 1, "why_not": reason}
    steps = SimpleNamespace(num_not_landed=0)
    captured = SimpleNamespace(receipt=lambda: told)
    said = receipt(
        parts_of(engine=SimpleNamespace(steps=steps, road=None, captured=captured)),
        None,
        fallbacks=[],
    )
    assert said["captured"] == told and said["fallbacks"] == lines
