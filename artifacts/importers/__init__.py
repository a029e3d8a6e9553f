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
    "llama.cpp": (
        "llama_cpp",
        (
            "CSV of tracers on llama.cpp's eval callback: phase,token,layer,rank,expert or "
            "pos,layer,id,id,... or, with --top-k, layer,expert"
        ),
    ),
    "strata": ("strata", "the binary of Strata's --dump-routing"),
    "sglang": (
        "sglang",
        "the .pt of SGLang's expert distribution recorder, mode per_token",
    ),
    "ds4": ("ds4", "text of LAYER ID ID ..., as a fork of ds4 writes with DS4_EXPERT_TRACE"),
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
