"""Finds the MoE layers of a transformers model by flags of its modules, not by family."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from artifacts.errors import BadInput

GATE_NAMES = ("gate", "router")
_GIVE_PROBABILITIES = ("Gemma4TextRouter",)  # classes of routers whose first output is no logits
_MAY_SKIP = ("ZayaRouter",)  # their last logit is for tokens that no expert computes
TOP_K_FIELDS = (
    "num_experts_per_tok",
    "top_k_experts",
)  # of a config whose router does not keep its top-k


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """One MoE layer; `index` counts MoE layers only, `name` is the path of its experts module in
    the model."""

    index: int
    name: str
    experts: nn.Module
    gate: nn.Module
    top_k: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of ONE expert's parameters by name: the module's shapes without their first
        dimension."""
        return {
            name: tuple(parameter.shape[1:])
            for name, parameter in self.experts.named_parameters(recurse=False)
        }

    @property
    def hidden_size(self) -> int:
        """Size of an expert's input and output, H."""
        return self.shapes["down_proj"][1 if self.experts.is_transposed else 0]

    @property
    def num_neurons(self) -> int:
        """Neurons of one expert, I."""
        return self.shapes["down_proj"][0 if self.experts.is_transposed else 1]

    @property
    def neuron_weights(self) -> int:
        """Number of weights and biases that belong to one neuron."""
        sizes = (prod(shape) for name, shape in self.shapes.items() if name != "down_proj_bias")
        return sum(sizes) // self.num_neurons

    @property
    def num_experts(self) -> int:
        return next(self.experts.parameters(recurse=False)).shape[0]

    def distribution(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the router's distribution [T, E], float32, from the first of its outputs: the
        softmax of the experts' logits."""
        scores = scores.float()
        kind = type(self.gate).__name__
        if kind in _GIVE_PROBABILITIES:
            return scores
        return (scores[..., :-1] if kind in _MAY_SKIP else scores).softmax(-1)


def moe_layers(model: PreTrainedModel) -> tuple[MoeLayer, ...]:
    """Return the MoE layers in order of depth.

    Raises BadInput if there are none, if a router cannot be found, or if layers differ in experts,
    shapes or top-k.
    """
    named = [name for name, module in model.named_modules() if _is_experts(module)]
    if not named:
        raise BadInput(
            f"{model.config.model_type} is not a Mixture-of-Experts model that moectl knows: it "
            "has no experts"
        )
    routers = tuple(_recorded_routers(model))
    layers = tuple(_layer(model, index, name, routers) for index, name in enumerate(named))
    if any(0 in shape for shape in layers[0].shapes.values()):
        raise BadInput(
            f"{layers[0].name} has experts of no neurons: correct the sizes in the model's "
            "config.json"
        )
    for layer in layers[1:]:
        _check_alike(layers[0], layer)
    return layers


def _is_experts(module: nn.Module) -> bool:
    """Return whether transformers' `use_experts_implementation` set its flags on this module."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def _recorded_routers(model: PreTrainedModel) -> Iterator[type[nn.Module]]:
    """Yield the classes whose output transformers records as `router_logits`."""
    for module in model.modules():
        recorded = getattr(module, "_can_record_outputs", None) or {}
        for recorder in _as_list(recorded.get("router_logits", [])):
            target = recorder.target_class if isinstance(recorder, OutputRecorder) else recorder
            if isinstance(target, type):
                yield target


def _layer(
    model: PreTrainedModel, index: int, name: str, routers: tuple[type[nn.Module], ...]
) -> MoeLayer:
    block_name = name.rpartition(".")[0]
    block = model.get_submodule(block_name)
    experts = model.get_submodule(name)
    gate = _gate(block, block_name, routers)
    owner = next((module for module in (gate, block) if hasattr(module, "top_k")), None)
    top_k = owner.top_k if owner else _configured_top_k(experts.config)
    if not isinstance(top_k, int):
        raise BadInput(
            f"{block_name} takes {top_k} experts per token: correct num_experts_per_tok in its "
            "config"
        )
    return MoeLayer(index, name, experts, gate, top_k)


def _configured_top_k(config: PreTrainedConfig) -> object:
    return next((getattr(config, name) for name in TOP_K_FIELDS if hasattr(config, name)), None)


def _gate(block: nn.Module, block_name: str, routers: tuple[type[nn.Module], ...]) -> nn.Module:
    siblings = dict(block.named_children())
    recorded = [module for module in siblings.values() if isinstance(module, routers)]
    named = [siblings[name] for name in GATE_NAMES if name in siblings]
    if not recorded + named:
        raise BadInput(
            f"{block_name} has no router module beside its experts: moectl cannot offload such a "
            "layer"
        )
    return (recorded + named)[0]


def _check_alike(first: MoeLayer, other: MoeLayer) -> None:
    if (first.num_experts, first.top_k, first.shapes) != (
        other.num_experts,
        other.top_k,
        other.shapes,
    ):
        raise BadInput(
            f"{other.name} and {first.name} differ in number, shape or top-k of their experts: "
            "moectl needs MoE layers that are alike"
        )


def _as_list(value: object) -> list:
    return value if isinstance(value, list) else [value]
