"""Random small models and lossless settings, with the outputs of the plain model, for torments."""

import random
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from artifacts.shape import Shape
from runtime.model.files.checkpoint import open_checkpoint
from runtime.model.files.pack import pack
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings
from tests.helpers.families import FAMILIES, VOCABULARY, save
from tests.helpers.varied import VARIED
from tests.runtime.session.test_session import plain_model

PRESETS = (
    "on-demand",
    "near",
    "mixtral-offloading",
    "moe-infinity",
    "specmd",
    "horizon",
    "monde",
    "monde-static",
    "full",
    "fmoe",
)
PRESETS += ("moepic",)
EVICTIONS = (
    "lru",
    "lfu",
    "lcp",
    "least_stale",
    "fld",
    "score",
    "random",
    "horizon",
    "late_horizon",
    "activation",
)
PREFETCHES = (
    "none",
    "next_gate",
    "next_gate:distance=2,overfetch=0.5,through=yes",
    "score",
    "frequency",
    "popular",
)
PREFETCHES += ("random", "activation", "affinity")
MISSES = ("fetch", "near", "near:fill=no", "near:ratio=0.3,fill=no", "qstar:ratio=0.5")
LINKS = ("disk", "300MB/s+5us", "2GB/s")
DTYPES = ("float32", "bfloat16", "float16")
FORMATS = ("hub", "fused", "shards", "packed")  # `packed` is what `moectl pack` writes
NUM_DECODED = 2
TEMPLATE = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}> "
_MOST_DEVICES = 16
_TOLERANCE = 1e-4  # relative to the largest logit


@dataclass(frozen=True, slots=True)
class Request:
    """A batch of prompts [B, S], the tokens [B, n] that follow, and the plain model's logits of
    each pass."""

    prompts: torch.Tensor
    tokens: torch.Tensor
    logits: list[torch.Tensor]


@dataclass
class Model:
    """One checkpoint, opened by moectl and by plain transformers."""

    folder: Path
    name: str
    opened: MoeModel = field(init=False)

    def __post_init__(self) -> None:
        self.opened = open_model(str(self.folder))

    @cached_property
    def plain(self) -> PreTrainedModel:
        return plain_model(self.folder)

    @cached_property
    def requests(self) -> list[Request]:
        """Requests of one to three prompts."""
        generator = torch.Generator().manual_seed(11)
        return [
            self._request(batch, length, generator)
            for batch, length in ((1, 3), (1, 12), (3, 7), (2, 1), (1, 25))
        ]

    def generated(self, prompt: torch.Tensor, count: int) -> list[int]:
        """Greedy tokens of the plain model."""
        named = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        with torch.inference_mode():
            return self.plain.generate(prompt, attention_mask=torch.ones_like(prompt), **named)[
                0, prompt.shape[1] :
            ].tolist()

    def _request(self, batch: int, length: int, generator: torch.Generator) -> Request:
        prompts = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
        tokens = torch.randint(3, VOCABULARY, (batch, NUM_DECODED), generator=generator)
        with torch.inference_mode():
            output = self.plain(prompts, use_cache=True)
            logits = [output.logits]
            for step in range(NUM_DECODED):
                output = self.plain(
                    tokens[:, step : step + 1],
                    past_key_values=output.past_key_values,
                    use_cache=True,
                )
                logits.append(output.logits)
        return Request(prompts, tokens, logits)


class Models:
    """Every family, with fields of its config varied, in every dtype, each in one of the formats;
    made at its first use."""

    def __init__(self, ground: Path) -> None:
        self._ground = ground
        self._made = {}

    def draw(self, rng: random.Random) -> Model:
        name = rng.choice(_choices())
        if name not in self._made:
            self._made[name] = Model(_written(*name, self._ground), "-".join(map(str, name)))
        return self._made[name]


def _choices() -> list[tuple[str, int, str, str]]:
    """Family, number of the set of varied fields (0: none), dtype and format of each model."""
    kinds = [(family, number) for family in FAMILIES for number in range(len(VARIED[family]) + 1)]
    named = enumerate((*kind, dtype) for kind in kinds for dtype in DTYPES)
    return [(*name, FORMATS[index % len(FORMATS)]) for index, name in named]


def _written(family: str, number: int, dtype: str, stored: str, ground: Path) -> Path:
    """A new checkpoint. The experts of GPT-OSS cannot be packed."""
    folder = ground / f"{family}-{number}-{dtype}"
    fields = VARIED[family][number - 1] if number else {}
    layout = "fused" if stored == "fused" else "hub"
    size = "40KB" if stored == "shards" else "50GB"
    save(family, layout, folder, getattr(torch, dtype), size, fields)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    if stored != "packed" or family == "gpt_oss":
        return folder
    opened = open_model(str(folder))
    packed = folder.with_name(f"{folder.name}-packed")
    pack(opened, open_checkpoint(folder), packed)
    opened.store.close()
    return packed


def draw_settings(rng: random.Random, shape: Shape) -> Settings:
    """Random lossless settings; half of the time some axes of the preset are replaced."""
    name = rng.choice(PRESETS)
    scope = rng.choice(("layer", "global"))
    policies = {}
    if rng.random() < 0.5 and name not in ("monde", "monde-static", "fmoe", "moepic", "full"):
        policies = {
            "eviction": rng.choice(EVICTIONS),
            "prefetch": rng.choice(PREFETCHES),
            "miss": rng.choice(MISSES),
        }
    if name == "moepic":
        policies["residency"] = "split:theta=" + rng.choice(("0.25", "0.5", "0.75"))
    least = 1 if scope == "global" and name not in ("monde-static", "moepic") else shape.num_layers
    least = max(least, shape.num_keys // 2) if name == "moepic" else least
    link = rng.choice(LINKS)
    near = rng.choice((None, "1GB/s"))
    window = rng.choice(("1B", "2KiB", "64KiB"))
    devices = (
        1
        if name == "moepic" or rng.random() < 0.4
        else rng.randint(1, min(_MOST_DEVICES, shape.num_experts))
    )
    return Settings(
        name,
        policies,
        budget=f"{rng.randint(min(least * devices, shape.num_keys), shape.num_keys)}x",
        scope=scope,
        link=link,
        near=near,
        window=window,
        learn=name == "fmoe",
        devices=devices,
    )


def said(session: Session, request: Request) -> list[torch.Tensor]:
    """The logits of every pass of a request."""
    session.new_requests(len(request.prompts))
    output = session.forward(request.prompts)
    logits = [output.logits]
    for step in range(request.tokens.shape[1]):
        output = session.forward(request.tokens[:, step : step + 1], past=output.past_key_values)
        logits.append(output.logits)
    return logits


def is_exact(session: Session) -> bool:
    """Return whether the session must equal the plain model bit for bit. Split experts and compiled
    kernels add in another order, which in bfloat16 changes the routing."""
    return session.parts.fast.split is None and not session.parts.is_fused


def differs(
    ours: list[torch.Tensor], theirs: list[torch.Tensor], *, to_the_bit: bool = True
) -> str:
    """Return how the logits differ from the plain model's; empty if they agree."""
    for number, (own, plain) in enumerate(zip(ours, theirs, strict=True)):
        off = float((own.float() - plain.float()).abs().max())
        if not torch.equal(own, plain) and (
            to_the_bit or off > _TOLERANCE * float(plain.float().abs().max())
        ):
            return f"pass {number} is {off:.2e} off"
    return ""


def described(settings: Settings) -> str:
    return str(replace(settings, policies=dict(settings.policies)))
