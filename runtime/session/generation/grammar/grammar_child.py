"""Tries a grammar within limits of time and memory, in a process of its own.

`grammar.py` starts this file as a script, which imports nothing of moectl: JSON on stdin, the
reason against the grammar on stdout.
"""

import json
import resource
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

# A model that falls into blanks would go on to the end of its answer; as in llama.cpp's grammars.
_FORM = {"whitespace_pattern": r" ?|\n[ \t]{0,20}", "lenient": False, "coerce_one_of": False}
_NO_TEXT = "NoExtension"
_NUM_BYTES = 256


def source(kind: str, text: str) -> str:
    """Return a grammar as llguidance reads it. Raises ValueError for JSON that is no schema."""
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, overrides=_FORM)
    return grammar_from(kind, text)


def matcher(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Return the state before the first token. Raises ValueError for a grammar that cannot be
    used."""
    limits = LLParserLimits(verbose_errors=False)
    found = LLMatcher(tokenizer, source(kind, text), log_level=0, limits=limits)
    found.compute_bitmask()  # what it keeps is shared with its copies
    if found.is_error():
        reason = found.get_error()
        raise ValueError("there is no such text" if reason.startswith(_NO_TEXT) else reason)
    return found


class ByteVocabulary:
    """A vocabulary of bytes. It stands in for the model's, which takes a second to build."""

    eos_token_id = _NUM_BYTES
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(_NUM_BYTES)), b"<end>")
    special_token_ids = (_NUM_BYTES,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main(limit_s: int, limit_nbytes: int) -> None:
    """Print what is wrong with the grammar on stdin, nothing if it can be used. SIGXCPU ends the
    process after `limit_s` of processor time, SIGABRT where memory is short."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (limit_nbytes, limit_nbytes))
    try:
        matcher(LLTokenizer(TokenizerWrapper(ByteVocabulary())), **json.load(sys.stdin))
    except Exception as error:
        print(json.dumps(str(error) or type(error).__name__))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
