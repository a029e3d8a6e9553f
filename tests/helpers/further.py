"""Checkpoints with a layer that predicts a further token, in each published naming, and what such a
layer gives by its formula."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from tests.helpers.families import character_tokenizer
from tools.make.families import tiny


@dataclass(frozen=True, slots=True)
class Further:
    """A family with such a layer: layer `index` of a model with the fields `own`, whose tensors
    have the names `block`; the fusion's and the end's have `names`, norms of token and state
    first, the matrices last."""

    family: str
    block: str
    names: tuple[str, ...]
    ends: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, object] = field(default_factory=dict)
    own: Mapping[str, object] = field(default_factory=dict)
    index: int = 1
    is_hidden_first: bool = False

    @property
    def has_streams(self) -> bool:
        return len(self.names) > 3


_NEXTN = {
    "block": "model.layers.2.",
    "names": tuple(f"model.layers.2.{name}" for name in ("enorm", "hnorm", "eh_proj")),
    "ends": {"norm.weight": "model.layers.2.shared_head.norm.weight"},
}
_MTP = {
    "block": "mtp.layers.0.",
    "names": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc"),
    "ends": {"norm.weight": "mtp.norm.weight"},
}
_MIXER = tuple(
    f"hyper_connection_mixer.{name}.weight"
    for name in ("hc_norm", "input_mix_weight_down", "input_mix_weight_up")
)
FURTHER: Mapping[str, Further] = {
    "deepseek_v3": Further("deepseek_v3", **_NEXTN, fields={"first_k_dense_replace": 1}),
    "glm4_moe": Further("glm4_moe", **_NEXTN),
    "qwen3_next": Further("qwen3_next", **_MTP),
    "qwen3_5_moe": Further("qwen3_5_moe", **_MTP),
    "mimo": Further(
        "qwen3_moe",
        "model.mtp_layers.0.",
        tuple(
            f"model.mtp_layers.0.{name}"
            for name in ("token_layernorm", "hidden_layernorm", "input_proj")
        ),
        {"norm.weight": "model.mtp_layers.0.final_layernorm.weight"},
        is_hidden_first=True,
    ),
    "mimo_v2_flash": Further(
        "mimo_v2_flash",
        "model.mtp.layers.0.",
        tuple(f"model.mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj")),
        {"norm.weight": "model.mtp.layers.0.final_layernorm.weight"},
        own={"layer_types": ["sliding_attention"] * 2, "mlp_layer_types": ["dense"] * 2},
    ),
    "ernie4_5_moe": Further(
        "ernie4_5_moe",
        "model.mtp_block.0.",
        ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0"),
        fields={"moe_layer_start_index": 1},
        own={"moe_layer_start_index": 1},
        index=0,
    ),
    "qwen4_exp": Further(
        "qwen4_exp_text",
        "mtp.layers.0.",
        (*_MTP["names"][:2], "mtp.fc_embedding", "mtp.fc_hidden"),
        {name: f"mtp.{name}" for name in _MIXER},
    ),
    "deepseek_v4": Further(
        "deepseek_v4",
        "mtp.0.",
        ("mtp.0.enorm", "mtp.0.hnorm", "mtp.0.e_proj", "mtp.0.h_proj"),
        {
            "norm.weight": "mtp.0.norm.weight",
            "hc_head.hc_fn": "mtp.0.hc_head_fn",
            "hc_head.hc_base": "mtp.0.hc_head_base",
            "hc_head.hc_scale": "mtp.0.hc_head_scale",
        },
        own={"layer_types": ["sliding_attention"] * 2, "mlp_layer_types": ["moe"] * 2},
    ),
}


class Reference:
    """The model of a case, and its further layer by the formula: of the whole sequence each time,
    without a cache."""

    def __init__(self, case: Further, **sizes: int) -> None:
        self._case = case
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = _rough(tiny(case.family, {**case.fields, **sizes}))
            self.donor = _rough(tiny(case.family, {**case.own, **sizes}))
            size = self._text(self.model).config.hidden_size
            width = size * self._text(self.model).config.hc_count if self._flat else size
            num_matrices = len(case.names) - 2
            shapes = [(size,), (width,), *[(size, size * (3 - num_matrices))] * num_matrices]
            self.sides = [0.3 * torch.randn(shape) for shape in shapes]
        if not case.ends:
            self.donor.get_decoder().norm = self.model.get_decoder().norm
        self.model.get_decoder().config.tie_last_hidden_states = not case.has_streams

    def save(self, path: Path) -> Path:
        """Write model and layer as published."""
        logging.disable_progress_bar()
        self.donor.save_pretrained(path / "donor", save_original_format=True)
        self.model.save_pretrained(path, save_original_format=True)
        donor = load_file(path / "donor" / "model.safetensors")
        tensors = load_file(path / "model.safetensors")
        layer = f"layers.{self._case.index}."
        for name, tensor in donor.items():
            _, found, own = name.partition(layer)
            if found:
                tensors[self._case.block + own] = tensor
        state = self.donor.get_decoder().state_dict()
        tensors |= {name: state[own] for own, name in self._case.ends.items()}
        for name, side in zip(self._case.names, self.sides, strict=True):
            tensors[f"{name}.weight"] = side
        if self._case.family == "deepseek_v4":  # transformers writes other names than it reads
            tensors = {
                re.sub(r"^model\.", "", name.replace("model.hc_head.hc_", "hc_head_")): tensor
                for name, tensor in tensors.items()
            }
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        character_tokenizer().save_pretrained(path)
        return path

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the states that the model hands on, of all tokens."""
        out = self.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        return out.hidden_states[-1]

    @torch.inference_mode()
    def drafts(self, ids: Sequence[int], num_drafts: int) -> list[int]:
        """Return the drafts behind all tokens."""
        hidden = self.hidden(ids[:-1])
        drafts: list[int] = []
        for _ in range(num_drafts):
            normed, handed = self.layer(torch.tensor([[*ids[1:], *drafts]]), hidden)
            logits = self.model.get_output_embeddings()(normed[0, -1])
            drafts.append(int(logits.argmax()))
            hidden = torch.cat([hidden, handed[:, -1:]], dim=1)
        return drafts

    def layer(self, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed states [B, S, H] of tokens [B, S] read with the states of the tokens
        before them, and the states that are handed on."""
        token_norm, state_norm, *matrices = self.sides
        token = self._norm(self.model.get_input_embeddings()(ids), token_norm)
        state = self._norm(hidden, state_norm)
        if self._case.has_streams:
            of_token, of_stream = matrices
            streams = state.view(*ids.shape, -1, token.shape[-1])
            fused = (token @ of_token.T)[:, :, None] + streams @ of_stream.T
            fused = fused.flatten(2) if self._flat else fused
        else:
            both = [state, token] if self._case.is_hidden_first else [token, state]
            fused = torch.cat(both, dim=-1) @ matrices[0].T
        decoder = self.donor.get_decoder()
        layer = decoder.layers[self._case.index]
        caught: list[torch.Tensor] = []
        hook = layer.register_forward_hook(lambda _, args, out: caught.append(out))
        others = [_Gives(fused if index < self._case.index else None) for index in range(2)]
        own = decoder.layers
        decoder.layers = nn.ModuleList(
            [layer if index == self._case.index else others[index] for index in range(2)]
        )
        inputs = token if self._case.has_streams else fused
        extra = {"ple_input_ids": ids} if self._flat else {}
        normed = decoder(inputs_embeds=inputs, use_cache=False, **extra).last_hidden_state
        decoder.layers = own
        hook.remove()
        return normed, caught[0] if self._case.has_streams else normed

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        config = self._text(self.model).config
        eps = getattr(config, "rms_norm_eps", None) or config.layernorm_epsilon
        from_zero = self._case.family.startswith(("qwen3_next", "qwen3_5", "qwen4"))
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return scaled * (weight + 1 if from_zero else weight)

    @property
    def _flat(self) -> bool:
        return self._case.family.startswith("qwen4")

    @staticmethod
    def _text(model: PreTrainedModel) -> nn.Module:
        return model.get_decoder()


class _Gives(nn.Module):
    """Stands for a layer: gives what it was made with, or what it is given."""

    def __init__(self, value: torch.Tensor | None) -> None:
        super().__init__()
        self._value = value

    def forward(self, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return x if self._value is None else self._value


def _rough(model: PreTrainedModel) -> PreTrainedModel:
    """Draw every weight that is a number or that all models have alike."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()
