"""Routing logs that other programs write, made into traces: one module a kind of log."""

KINDS = {
    "vllm": (
        "vllm",
        (
            "responses of vLLM with --enable-return-routed-experts: one a line, or a .json of one "
            "or several"
        ),
    ),
    "moe-jsonl": (
        "moe_jsonl",
        "a JSON line for each token and layer, as vLLM-MoE-Logger writes; a file or a folder",
    ),
    "csv": (
        "layer_csv",
        (
            "lines of layer_id,expert_ids in the order of computation, as patched llama.cpp "
            "servers log"
        ),
    ),
    "flame-moe": (
        "flame_moe",
        "FLAME-MoE's Parquet with indices and scores: the folder of layers, or one layer's file",
    ),
    "router-logits": (
        "router_logits",
        "logits or probabilities of all experts: .npy, .npz or a folder of .npy",
    ),
}
"""The module here whose `read` makes a `RoutingLog` of a source, and a description of the source,
by the name on the command line."""
