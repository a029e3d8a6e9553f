"""Tokenizer built from the entries of a GGUF file, with the ids of llama.cpp."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from transformers import PreTrainedTokenizerFast

from artifacts.errors import BadInput
from artifacts.formats.gguf.gguf_header import read_array, read_header
from runtime.model.gguf.scores import SPACE, by_score
from runtime.model.gguf.splitting import AS_GPT2, OF_CHARACTERS, pre_tokenizer, splitting_of
from runtime.model.gguf.vocabulary import (
    BYTE_LEVEL,
    CHARACTERS,
    CONTROL,
    SENTENCEPIECE,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
    vocabulary_numbers,
)

_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_MATCHED = (UNKNOWN, CONTROL, USER_DEFINED)  # tokens that are found in a text before all else
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_TO_TEXT = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]


class GgufTokenizer(PreTrainedTokenizerFast):
    """Tokenizer of a GGUF file. `unfollowed` has a line for each thing in which ids may differ from
    llama.cpp's."""

    def __init__(
        self, backend: Tokenizer, vocabulary: Vocabulary, template: object, unfollowed: list[str]
    ) -> None:
        self._tokenizer = backend
        super().__init__(chat_template=template if isinstance(template, str) else None)
        self.unfollowed = tuple(unfollowed)
        self._ends = vocabulary.ends
        for role, name in _NAMED.items():
            # set here, as what is given to the constructor is found in texts
            if role in vocabulary.roles:
                setattr(self, name, vocabulary.tokens[vocabulary.roles[role]])

    def _decode(
        self, token_ids: int | list[int], skip_special_tokens: bool = False, **others: object
    ) -> str:
        """Also leave out tokens that end an answer and are of no special type."""
        if skip_special_tokens and not isinstance(token_ids, int):
            token_ids = [token for token in token_ids if token not in self._ends]
        return super()._decode(token_ids, skip_special_tokens=skip_special_tokens, **others)


def gguf_tokenizer(path: Path) -> GgufTokenizer | None:
    """Return the tokenizer of a GGUF file, the first of several; None if it has none.

    Raises BadInput for a tokenizer that is damaged or of a kind that is not read.
    """
    vocabulary = read_vocabulary(path)
    if vocabulary is None:
        return None
    entries = read_header(path).entries
    unfollowed: list[str] = []
    backend, adds_bos = _BUILD[vocabulary.kind](path, entries, vocabulary, unfollowed)
    _add_tokens(backend, vocabulary, str(entries.get("general.name", "")), unfollowed)
    unfollowed += _overlaps(vocabulary)
    if vocabulary.kind != CHARACTERS:  # which begin with it whatever the file says
        adds_bos = bool(entries.get("tokenizer.ggml.add_bos_token", adds_bos))
    adds_eos = bool(entries.get("tokenizer.ggml.add_eos_token", False))
    backend.post_processor = _post_processor(path, vocabulary, adds_bos, adds_eos)
    return GgufTokenizer(backend, vocabulary, entries.get("tokenizer.chat_template"), unfollowed)


def _byte_level(
    path: Path, entries: Mapping[str, object], vocabulary: Vocabulary, unfollowed: list[str]
) -> tuple[Tokenizer, bool]:
    name = str(entries.get("tokenizer.ggml.pre", "default"))
    if name in OF_CHARACTERS:
        raise BadInput(
            f"{path} has a tokenizer of the kind {name}, which moectl does not read: take another "
            "file"
        )
    splitting = splitting_of(name)
    if splitting is None:
        unfollowed.append(
            f"text is split as for GPT-2, not as {name[:40]}: some tokens may be others"
        )
        splitting = AS_GPT2
    merges = {} if name == "kimi-k2" else _stored_merges(path)
    known = _known_merges(merges, vocabulary, ByteLevel.alphabet(), unfollowed)
    backend = Tokenizer(BPE(dict(vocabulary.ids), known, ignore_merges=splitting.ignores_merges))
    backend.pre_tokenizer = pre_tokenizer(splitting)
    backend.decoder = decoders.ByteLevel()
    return backend, splitting.adds_bos


def _of_characters(
    path: Path, entries: Mapping[str, object], vocabulary: Vocabulary, unfollowed: list[str]
) -> tuple[Tokenizer, bool]:
    """Build Gemma 4's tokenizer: merges of characters, with tokens of bytes for those that are no
    token, in lines and in runs of newlines."""
    known = _known_merges(_stored_merges(path), vocabulary, _BYTES, unfollowed)
    backend = Tokenizer(BPE(dict(vocabulary.ids), known, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = Split(Regex(r"\n+"), "isolated")
    backend.decoder = decoders.Sequence(_TO_TEXT)
    runs = [text for text in vocabulary.ids if not text.strip("\n")]
    if any(len(backend.encode(run).ids) > 1 for run in runs):
        unfollowed.append("merges do not make each run of newlines that is a token")
    return backend, True


def _stored_merges(path: Path) -> Collection[tuple[str, str]]:
    stored = read_array(path, "tokenizer.ggml.merges")
    if stored is None:
        raise BadInput(f"{path} has no tokenizer.ggml.merges: take another file")
    return dict.fromkeys(_pair(merge) for merge in stored)


def _known_merges(
    merges: Collection[tuple[str, str]],
    vocabulary: Vocabulary,
    bytes_: Iterable[str],
    unfollowed: list[str],
) -> list[tuple[str, str]]:
    """Return the merges of tokens to tokens, and add a line if there are others, or if a byte is no
    token."""
    known = [pair for pair in merges if vocabulary.ids.keys() >= {*pair, "".join(pair)}]
    if len(known) < len(merges) or not vocabulary.ids.keys() >= set(bytes_):
        unfollowed.append(
            "the vocabulary lacks bytes, or what merges join: some tokens may be others"
        )
    return known


def _pair(merge: str) -> tuple[str, str]:
    """Return both parts of a merge. They are separated by the first space that is not the merge's
    first character."""
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _sentencepiece(
    path: Path, entries: Mapping[str, object], vocabulary: Vocabulary, unfollowed: list[str]
) -> tuple[Tokenizer, bool]:
    scores = vocabulary_numbers(path, "scores", len(vocabulary.tokens)) or [0.0] * len(
        vocabulary.tokens
    )
    merges = _merges(vocabulary, scores)
    if not vocabulary.ids.keys() >= set(_BYTES):
        unfollowed.append(
            "the vocabulary lacks tokens of bytes: unknown characters are one unknown token"
        )
    unknown = vocabulary.roles.get("unknown")
    model = BPE(
        dict(vocabulary.ids),
        merges or [],
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
        ignore_merges=merges is None,
    )
    backend = Tokenizer(model)
    if merges is None:
        backend.pre_tokenizer = by_score(vocabulary.ids, scores)
    spaces = normalizers.Replace(" ", SPACE)
    if entries.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        backend.decoder = decoders.Sequence([*_TO_TEXT, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = spaces
        backend.decoder = decoders.Sequence(_TO_TEXT)
    return backend, True


_BUILD = {BYTE_LEVEL: _byte_level, CHARACTERS: _of_characters, SENTENCEPIECE: _sentencepiece}


def _merges(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]] | None:
    """Return the merges that make each token of two others, best first. Return None where no order
    of merges can replace scores: where tokens share a score, since the leftmost in the text is then
    made first, and where a token contains a character that is no token."""
    ids = vocabulary.ids
    found = []
    for text, token in ids.items():
        if SPACE not in text and vocabulary.types[token] in _MATCHED:
            continue  # never made: it is found in the text before
        for cut in range(1, len(text)):
            left = text[:cut]
            right = text[cut:]
            if left in ids and right in ids:
                found.append((-scores[token], token, (left, right)))
            elif (left in ids or cut == 1) and (right in ids or len(right) == 1):
                return None
    found.sort()
    made = {(score, token) for score, token, _ in found}
    if len({score for score, _ in made}) < len(made):
        return None
    return [pair for *_, pair in found]


def _add_tokens(
    backend: Tokenizer, vocabulary: Vocabulary, model: str, unfollowed: list[str]
) -> None:
    """Add the tokens that are found in a text before all else. llama.cpp knows only from the
    model's name where spaces beside them are dropped."""
    drops_after = any(name in model.lower() for name in ("phi-3", "phi3"))
    drops_before = "modern-bert" in model.lower()
    if drops_after or drops_before:
        unfollowed.append(
            "spaces beside special tokens are dropped, by the model's name: some tokens may be "
            "others"
        )
    for type_ in _MATCHED:
        is_special = type_ != USER_DEFINED
        added = [
            AddedToken(
                text,
                lstrip=drops_before and text == "[MASK]",
                rstrip=drops_after and text not in ("<unk>", "<s>", "<|endoftext|>"),
                normalized=False,
                special=is_special,
            )
            for text, token in vocabulary.ids.items()
            if vocabulary.types[token] == type_
        ]
        (backend.add_special_tokens if is_special else backend.add_tokens)(added)


def _overlaps(vocabulary: Vocabulary) -> Iterator[str]:
    """Yield a line if one token that is found before all else can begin within another one: the
    first in the text is taken, whereas llama.cpp takes the longer."""
    texts = [text for text, token in vocabulary.ids.items() if vocabulary.types[token] in _MATCHED]
    begun = {text[:length]: text for text in texts for length in range(1, len(text))}
    for text in texts:
        for length in range(1, len(text)):
            other = begun.get(text[-length:])
            if other is not None and len(set(text + other)) > 1:
                yield (
                    f"the tokens {text[:30]!r} and {other[:30]!r} overlap: where both are in a "
                    "text, ids may differ"
                )
                return


def _post_processor(
    path: Path, vocabulary: Vocabulary, adds_bos: bool, adds_eos: bool
) -> processors.TemplateProcessing:
    roles = ("bos",) * adds_bos + ("eos",) * adds_eos
    for role in roles:
        if role not in vocabulary.roles:
            raise BadInput(
                f"{path} says tokenizer.ggml.add_{role}_token, and no {role}_token_id: take "
                "another file"
            )
    before = "bos " * adds_bos
    after = " eos" * adds_eos
    special = [
        {
            "id": role,
            "ids": [vocabulary.roles[role]],
            "tokens": [vocabulary.tokens[vocabulary.roles[role]]],
        }
        for role in roles
    ]
    return processors.TemplateProcessing(
        single=f"{before}$A{after}", pair=f"{before}$A{after} $B:1{after}", special_tokens=special
    )
