"""Reads held-out text with llama.cpp, by the package `xllamacpp`, which holds its server in this
process."""

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from artifacts.errors import BadInput
from profilers.compare.quality import TextReading

PACKAGE = "xllamacpp"
# One letter, whatever the model says: a token that ends within a character would be held back,
# probabilities and all.
_ANSWER = {"logit_bias": [["a", 1e4]], "samplers": []}
# Tokens as the model's probabilities are, or one and the same would want the same experts again.
_DRAWN = {
    "prompt": [5, 6],
    "cache_prompt": False,
    "ignore_eos": True,
    "samplers": ["temperature"],
    "temperature": 1.0,
}


def check_installed() -> None:
    """Raise BadInput where llama.cpp is not installed."""
    if find_spec(PACKAGE) is None:
        raise BadInput("llama.cpp is run by the package xllamacpp: pip install 'moectl[peers]'")


class LlamaCpp:
    """A GGUF file, opened on the CPU."""

    def __init__(self, path: Path, *, threads: int, num_tokens: int, vocab_size: int) -> None:
        """Open the file for sequences of up to `num_tokens`. Raises BadInput where llama.cpp
        cannot."""
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = num_tokens + 1
        parameters.n_parallel = 1
        parameters.n_gpu_layers = 0
        parameters.verbosity = -1
        for used in (parameters.cpuparams, parameters.cpuparams_batch):
            used.n_threads = threads
        try:
            self._server = xllamacpp.Server(parameters)
        except RuntimeError as error:
            raise BadInput(f"llama.cpp cannot open {path.name}: {error}") from error
        self._vocab_size = vocab_size

    def read(self, sequences: Sequence[np.ndarray], *, prefill: int) -> TextReading:
        """Read the text as `quality.read_by` does: a prompt of `prefill` tokens of each sequence,
        then one token after another. `logits` are log-probabilities.

        Seconds are measured by llama.cpp's own clock, around its computing: a request takes longer.
        """
        logits = []
        prefill_s = []
        decode_s = []
        for sequence in sequences:
            row, seconds = self._next(sequence[:prefill], keep=False)
            prefill_s.append(seconds)
            for position in range(prefill, len(sequence)):
                logits.append(row)
                row, seconds = self._next(sequence[: position + 1], keep=True)
                decode_s.append(seconds)
        targets = torch.from_numpy(np.concatenate([sequence[prefill:] for sequence in sequences]))
        stacked = torch.from_numpy(np.stack(logits))
        return TextReading(
            stacked, targets, tuple(prefill_s), tuple(decode_s), (0.0,) * len(decode_s)
        )

    def token_seconds(self, num_tokens: int, *, seed: int) -> tuple[float, float]:
        """Decode that many drawn tokens; return the seconds of one by llama.cpp's own clock, and
        by the clock of this process's processor time, which all threads and their waiting count
        in."""
        clocks = []
        for count in (1, 1 + num_tokens):
            begin_s = time.process_time()
            answer = self._server.handle_completions(_DRAWN | {"n_predict": count, "seed": seed})
            clocks.append(time.process_time() - begin_s)
        timings = answer["timings"]
        assert timings["predicted_n"] == 1 + num_tokens, timings
        return timings["predicted_ms"] / 1e3 / (1 + num_tokens), (
            clocks[1] - clocks[0]
        ) / num_tokens

    def _next(self, ids: np.ndarray, *, keep: bool) -> tuple[np.ndarray, float]:
        """Return log-probabilities [V] of the token after `ids`, and the seconds of reading the new
        ones: with `keep` the ids beyond the last request, else all."""
        asked = {
            "prompt": ids.tolist(),
            "n_predict": 1,
            "n_probs": self._vocab_size,
            "cache_prompt": keep,
        }
        answer = self._server.handle_completions(asked | _ANSWER)
        timings = answer["timings"]
        content = answer["choices"][0]["logprobs"]["content"]
        assert timings["prompt_n"] == (1 if keep else len(ids)), "llama.cpp forgot what it had read"
        row = np.full(self._vocab_size, -np.inf, np.float32)
        for each in content[0]["top_logprobs"]:
            row[each["id"]] = each["logprob"]
        return row, timings["prompt_ms"] / 1e3
