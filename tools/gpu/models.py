"""Models of published shapes with random weights but realistic routing: skewed, and similar from
token to token.

Random routers spread over all experts alike, and tokens share no more than chance: nothing could be
cached. Here one channel of every token is constant and gives each expert a popularity, by Zipf's
law, drawn anew in every layer; and every token belongs to a topic, which a text keeps for a while,
so that its tokens resemble each other.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

# probability that the next token has the same topic
TOPICS = 16
STAYS = 0.92
# of a token's embedding, as root mean squares
_CONSTANT = 0.3
_TOPIC = 0.4
_OWN = 0.85
# Zipf's exponent of popularity; the spread of what else a router says
_SKEW = 0.6
_SHARPNESS = 1.0
_GAIN = 4.0  # scale of the experts' last matrix: a layer must change the next router's input
SMALLEST = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model to make: `kind` names transformers' classes; `layers` of the `published` number, by
    default. A sparse one has no experts on disk."""

    kind: str
    layers: int
    published: int
    sizes: dict[str, int]
    tiny: dict[str, int]
    is_sparse: bool = False


SHAPES = {
    "olmoe-1b-7b": Shape(
        "Olmoe",
        layers=16,
        published=16,
        sizes={
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        tiny={"num_experts": 16, "num_experts_per_tok": 4},
    ),
    "mixtral-8x7b": Shape(
        "Mixtral",
        layers=5,
        published=32,
        sizes={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        tiny={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3-30b-a3b": Shape(
        "Qwen3Moe",
        layers=48,
        published=48,
        sizes={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        tiny={
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "head_dim": 16,
        },
        is_sparse=True,
    ),
}


def save(shape: Shape, folder: Path, *, layers: int, device: str, tiny: bool) -> None:
    """Write a model of this shape, in bfloat16 and with every layer's experts in one tensor, as
    Accelerate needs it.

    It is made on `device`, as random numbers come slowly on a CPU.
    """
    import transformers

    from tools.gpu import sparse

    sizes = SMALLEST | (shape.tiny if tiny else shape.sizes | {"num_hidden_layers": layers})
    config = getattr(transformers, f"{shape.kind}Config")(**sizes)
    if shape.is_sparse:
        sparse.save(config, folder, device=device, give_routing=give_routing)
        return
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    give_routing(model)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder, save_original_format=False)


@torch.no_grad()
def give_routing(model: nn.Module) -> None:
    """Set embeddings with topics and a constant channel, and routers that read them."""
    from runtime.model.layers import moe_layers

    embeddings = model.get_input_embeddings().weight
    random = torch.Generator(embeddings.device).manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random, device=embeddings.device)

    vocabulary, hidden = embeddings.shape
    topics = torch.arange(vocabulary, device=embeddings.device) % TOPICS
    values = _TOPIC * normal(TOPICS, hidden)[topics] + _OWN * normal(vocabulary, hidden)
    values[:, 0] = _CONSTANT * hidden**0.5
    embeddings.copy_(values)
    for layer in moe_layers(model):
        gate = layer.gate.weight
        gate.copy_(_SHARPNESS * normal(*gate.shape) / hidden**0.5)
        ranks = torch.randperm(len(gate), generator=random, device=gate.device)
        gate[:, 0] = -_SKEW * (ranks + 1.0).log() / (_CONSTANT * hidden**0.5)
        if not layer.experts.down_proj.is_meta:
            layer.experts.down_proj.mul_(_GAIN)


def texts(vocabulary: int, *, count: int, length: int, seed: int = 0) -> list[np.ndarray]:
    """Token ids that follow a topic for a while, without the three special ones."""
    random = np.random.default_rng(seed)
    by_topic = [
        np.arange(3, vocabulary)[np.arange(3, vocabulary) % TOPICS == topic]
        for topic in range(TOPICS)
    ]
    found = []
    for _ in range(count):
        topic = random.integers(TOPICS)
        ids = []
        for _ in range(length):
            topic = topic if random.random() < STAYS else random.integers(TOPICS)
            ids.append(random.choice(by_topic[topic]))
        found.append(np.array(ids, np.int64))
    return found


@dataclass(frozen=True, slots=True)
class Routing:
    """Means over layers: the share of a token's experts that the previous token selected, the same
    by chance, and the share of all selections on the busiest quarter of the experts."""

    repeated: float
    by_chance: float
    busiest_quarter: float


@torch.inference_mode()
def routing(model: nn.Module, ids: np.ndarray) -> Routing:
    """Statistics of the routing of one text by a plain model."""
    from runtime.model.layers import moe_layers

    layers = moe_layers(model)
    said = []
    hooks = [
        layer.gate.register_forward_hook(lambda gate, args, output: said.append(output[0]))
        for layer in layers
    ]
    model(input_ids=torch.from_numpy(ids)[None].to(model.device))
    for hook in hooks:
        hook.remove()
    top_k = layers[0].top_k
    num_experts = layers[0].num_experts
    repeated = []
    quarter = []
    for logits in said:
        chosen = logits.flatten(0, -2).float().topk(top_k).indices.cpu()
        repeated.append((chosen[1:, :, None] == chosen[:-1, None, :]).any(-1).float().mean().item())
        counts = chosen.flatten().bincount(minlength=num_experts).sort(descending=True).values
        quarter.append((counts[: num_experts // 4].sum() / counts.sum()).item())
    return Routing(float(np.mean(repeated)), top_k / num_experts, float(np.mean(quarter)))
