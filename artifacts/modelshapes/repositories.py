"""Short names of models, and their repositories on the Hugging Face hub."""

from typing import NamedTuple


class Repositories(NamedTuple):
    """Hub ids of a model: `hub` has it as its authors published it, for a chat where there is one,
    `gguf` in GGUF, empty for none."""

    hub: str
    gguf: str = ""


REPOSITORIES = {
    "mixtral-8x7b": Repositories("mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "mixtral-8x22b": Repositories("mistralai/Mixtral-8x22B-Instruct-v0.1"),
    "olmoe-1b-7b": Repositories("allenai/OLMoE-1B-7B-0924", "allenai/OLMoE-1B-7B-0924-GGUF"),
    "qwen1.5-moe-a2.7b": Repositories("Qwen/Qwen1.5-MoE-A2.7B-Chat"),
    "qwen2-57b-a14b": Repositories(
        "Qwen/Qwen2-57B-A14B-Instruct", "Qwen/Qwen2-57B-A14B-Instruct-GGUF"
    ),
    "deepseek-v2-lite": Repositories("deepseek-ai/DeepSeek-V2-Lite-Chat"),
    "deepseek-v2": Repositories("deepseek-ai/DeepSeek-V2-Chat"),
    "deepseek-v3": Repositories("deepseek-ai/DeepSeek-V3", "unsloth/DeepSeek-V3-GGUF"),
    "qwen3-30b-a3b": Repositories("Qwen/Qwen3-30B-A3B", "unsloth/Qwen3-30B-A3B-GGUF"),
    "qwen3-235b-a22b": Repositories("Qwen/Qwen3-235B-A22B", "unsloth/Qwen3-235B-A22B-GGUF"),
    "qwen3-235b-a22b-fp8": Repositories("Qwen/Qwen3-235B-A22B-FP8"),
    "qwen3-235b-a22b-gptq-int4": Repositories("Qwen/Qwen3-235B-A22B-GPTQ-Int4"),
    "phi-3.5-moe": Repositories("microsoft/Phi-3.5-MoE-instruct"),
    "gpt-oss-20b": Repositories("openai/gpt-oss-20b", "ggml-org/gpt-oss-20b-GGUF"),
    "gpt-oss-120b": Repositories("openai/gpt-oss-120b", "ggml-org/gpt-oss-120b-GGUF"),
    "qwen3-next-80b-a3b": Repositories(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", "unsloth/Qwen3-Next-80B-A3B-Instruct-GGUF"
    ),
    "qwen3.6-35b-a3b": Repositories("Qwen/Qwen3.6-35B-A3B", "unsloth/Qwen3.6-35B-A3B-GGUF"),
    "qwen3.8-flash-next": Repositories(
        "Qwen/Qwen3.8-Flash-Next", "unsloth/Qwen3.8-Flash-Next-GGUF"
    ),
    "deepseek-v4-flash": Repositories(
        "deepseek-ai/DeepSeek-V4-Flash", "unsloth/DeepSeek-V4-Flash-0731-GGUF"
    ),
    "deepseek-v4.1-flash": Repositories("deepseek-ai/DeepSeek-V4.1-Flash"),
    "glm-5.2": Repositories("zai-org/GLM-5.2", "unsloth/GLM-5.2-GGUF"),
    "glm-5.3-flash": Repositories("zai-org/GLM-5.3-Flash", "unsloth/GLM-5.3-Flash-GGUF"),
    "gemma-4-26b-a4b": Repositories("google/gemma-4-26B-A4B-it", "unsloth/gemma-4-26B-A4B-it-GGUF"),
    "minimax-m3": Repositories("MiniMaxAI/MiniMax-M3"),
    "kimi-k3": Repositories("moonshotai/Kimi-K3", "unsloth/Kimi-K3-GGUF"),
}
"""By short names, those of `MODELS` among them."""
