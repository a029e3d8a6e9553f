"""Architectures of Mixtral, OLMoE and dots.llm1, whose names and fields are mostly shared ones."""

from runtime.model.gguf.layout import (
    EXPERTS,
    GROUPED,
    GROUPED_NAMES,
    LOCAL_EXPERTS,
    SIGMOID,
    Architecture,
)

ARCHITECTURES = {
    "dots1": Architecture("dots1", GROUPED, GROUPED_NAMES, gating=SIGMOID),
    "llama": Architecture("mixtral", LOCAL_EXPERTS, is_permuted=True),
    "olmoe": Architecture("olmoe", EXPERTS, fixed={"norm_topk_prob": False}),
}
