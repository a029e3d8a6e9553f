"""`moectl run`: a prompt, or a chat, through a model whose experts are elsewhere; and what that took."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from artifacts.errors import BadInput, BadUsage, first_line
from artifacts.files import check_writable
from artifacts.provenance import utc_now
from artifacts.replicas import FULL_BITS, check_base
from artifacts.store import Store
from artifacts.tracefile import write_parquet
from moectl.bundled import demo_model
from moectl.commands.profile import check_store, model_info
from moectl.opening import open_quietly
from moectl.render import Sheet, human_bytes, show_json, show_sheet
from moectl.text import Text
from runtime.base import on_base
from runtime.counters import AT_BITS, hit_rate
from runtime.generate import Sampling, Timing, Token
from runtime.learning import keep
from runtime.model import MoeModel
from runtime.named import find_presets
from runtime.policies import Preset
from runtime.policies.base import Artefacts
from runtime.session import Session, Settings
from runtime.stored import load_artefacts

_COUNTED = ("late", "misses", "fetched", "near", "low", "spared", "collisions", "evictions")


def run_command(
    name: str | None,
    prompt: str | None,
    settings: Settings,
    sampling: Sampling,
    *,
    is_chat: bool,
    trace: Path | None,
    store: Path,
    base: int,
    as_json: bool,
) -> None:
    """The whole of `moectl run`: one prompt, or a chat, and what it took."""
    if is_chat == (prompt is not None):
        raise BadUsage("give either --prompt TEXT or --chat")
    if is_chat and (as_json or trace):
        raise BadUsage("--json and --trace go with --prompt, not with --chat")
    if trace:
        check_writable(trace)
    name = name or str(demo_model())
    if settings.learn:
        check_store(store)
    check_base(base)
    with open_session(name, settings, store=store, base=base) as session, keeping_maps(session, name, store=store):
        if is_chat:
            for answer in chat(session, sampling):
                print(took(answer), file=sys.stderr)
            show_sheet(counters_sheet(effort(session)))
            show_sheet(receipt_sheet(session.receipt()))
        else:
            show(run(session, prompt, sampling, echo=not as_json, trace=trace), as_json=as_json)


@contextmanager
def keeping_maps(session: Session, name: str, *, store: Path) -> Iterator[None]:
    """Where the session learns, what it has learned is written when the block ends, whole iterations only; also when
    somebody stopped it."""
    started_at = utc_now()
    try:
        yield
    finally:
        if session.settings.learn:
            _keep_maps(session, name, store, started_at)


def _keep_maps(session: Session, name: str, store: Path, started_at: datetime) -> None:
    kept = keep(
        session.matching.learned(),
        store_path=store,
        model=model_info(name, session.opened),
        began_with=session.maps_run,
        started_at=started_at,
    )
    if kept is None:  # the run ended before its first pass did, and says why
        return
    others = f"; run {kept.others} had learned meanwhile: its maps are among them" if kept.others else ""
    said = f"learned from {kept.num_iterations:,} iterations: run {kept.run_id} of {store} holds {kept.num_maps:,} maps"
    print(said + others, file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Effort:
    """What a stretch of passes took of the cache and the link."""

    counters: dict[str, int]
    by_layer: list[dict[str, int]]
    exposed_ms: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What was generated, and what it took."""

    token_ids: list[int]
    text: str
    effort: Effort
    timing: Timing
    receipt: dict[str, object]


def open_session(name: str, settings: Settings, *, store: Path, base: int = FULL_BITS) -> Session:
    """A session on a base, with what the store knows of this model; without a store, with nothing."""
    return session_on(open_quietly(name, device=settings.device), name, settings, store=store, base=base)


def session_on(opened: MoeModel, name: str, settings: Settings, *, store: Path, base: int = FULL_BITS) -> Session:
    """The same on a model that is open, `name` as the user gave it; no other session has it."""
    if isinstance(settings.preset, Preset):
        own = find_presets([settings.preset.name], store, model_id=opened.fingerprint[:16])
        settings = replace(settings, preset=own.get(settings.preset.name, settings.preset))
    known = artefacts_for(name, opened, settings, store=store, base=base)
    opened, artefacts = on_base(opened, known, base)
    return Session(opened, settings, artefacts=artefacts)


def artefacts_for(name: str, opened: MoeModel, settings: Settings, *, store: Path, base: int = FULL_BITS) -> Artefacts:
    """What the base and the chosen policies want; a store they do not need is not opened, and one of another model is
    refused only where they cannot do without it. Raises Incompatible."""
    is_packed = base != FULL_BITS
    if not (settings.wants or is_packed) or not store.exists():
        return Artefacts()
    with Store.open(store, read_only=True) as held:
        is_needed = is_packed or settings.requires and not settings.learn
        if not is_needed and opened.fingerprint not in {model.fingerprint for model in held.models()}:
            return Artefacts()
        model = held.require_model(opened.fingerprint, name=name)
        return load_artefacts(held, model.model_id, opened.shape, wants=settings.wants)


def run(session: Session, prompt: str, sampling: Sampling, *, echo: bool, trace: Path | None = None) -> Answer:
    """Generate after `prompt`; with `echo` the text goes to stdout as it comes."""
    recorder = session.record() if trace else None
    answer = _answer(session, encode(session, prompt), sampling, echo=echo)
    if recorder:
        write_parquet(recorder.trace(), trace)
    return answer


def chat(session: Session, sampling: Sampling) -> Iterator[Answer]:
    """Read turns from stdin until it ends, answer each on stdout; the whole conversation is the prompt."""
    turns: list[dict[str, str]] = []
    while (line := _ask()) is not None:
        turns.append({"role": "user", "content": line})
        answer = _answer(session, encode_chat(session, turns), sampling, echo=True)
        turns.append({"role": "assistant", "content": answer.text})
        yield answer
        session.fold()


def encode(session: Session, prompt: str) -> torch.Tensor:
    """Token ids [1, S]."""
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # Python's sign for bytes that are not UTF-8
        raise BadInput("the prompt is not text in UTF-8: convert it")
    ids = _tokenizer(session)(prompt, return_tensors="pt").input_ids if prompt else torch.zeros(1, 0)
    return ids.to(torch.int64)


def encode_chat(session: Session, turns: list[dict[str, str]]) -> torch.Tensor:
    """The conversation by the tokenizer's chat template; without one turns are separated by blank lines."""
    tokenizer = _tokenizer(session)
    if tokenizer.chat_template:
        try:
            encoded = tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:  # a template is a program, and the model's: whatever it does, that is what is wrong
            raise BadInput(
                f"the model's chat template cannot be used ({first_line(error)}): give --prompt instead"
            ) from error
        return encoded["input_ids"]
    note = "the tokenizer has no chat template: turns are separated by blank lines"
    if note not in session.fallbacks:
        session.fallbacks.append(note)
    return encode(session, "\n\n".join(turn["content"].strip() for turn in turns) + "\n\n")


def show(answer: Answer, *, as_json: bool) -> None:
    """Print the counters and the receipt, or everything as one JSON object."""
    if as_json:
        show_json(
            {
                "token_ids": answer.token_ids,
                "text": answer.text,
                "counters": answer.effort.counters | {"exposed_ms": answer.effort.exposed_ms},
                "by_layer": answer.effort.by_layer,
                "receipt": answer.receipt,
                "ttft_ms": answer.timing.ttft_ms,
                "tpot_ms": answer.timing.tpot_ms,
            }
        )
        return
    print()
    show_sheet(counters_sheet(answer.effort, note=took(answer)))
    show_sheet(receipt_sheet(answer.receipt))


def effort(session: Session, *, first_pass: int = 0) -> Effort:
    """Everything since pass `first_pass`."""
    counters = session.controller.counters
    stall_s = sum(session.engine.stall_s[first_pass:])
    return Effort(counters.totals(first_pass=first_pass), counters.by_layer(first_pass=first_pass), stall_s * 1e3)


def counters_sheet(effort: Effort, *, note: str = "") -> Sheet:
    columns = ("layer", "requests", "hit rate", *_COUNTED)
    rows = [_counter_row(layer, counts) for layer, counts in enumerate(effort.by_layer)]
    rows.append(_counter_row("all", effort.counters))
    return Sheet("Counters", columns, rows, note)


def took(answer: Answer) -> str:
    """One line on what an answer took."""
    counts, timing = answer.effort.counters, answer.timing
    return (
        f"{len(answer.token_ids)} tokens; first after {timing.ttft_ms:.1f} ms, then {timing.tpot_ms:.2f} ms each; "
        f"{human_bytes(counts['demand_bytes'])} on demand, {human_bytes(counts['prefetch_bytes'])} prefetched "
        f"({human_bytes(counts['wasted_bytes'])} of it wasted), {answer.effort.exposed_ms:.1f} ms of stall; "
        f"{counts['replaced_ranks']} ranks replaced, {counts['dropped_ranks']} dropped{_few_bits(counts)}"
    )


def _few_bits(counts: dict[str, int]) -> str:
    """How many experts were computed below full precision, if any."""
    at = [(bits, counts[name]) for bits, name in AT_BITS.items() if counts[name]]
    return "".join(f"; {count} experts at {bits} {'bit' if bits == 1 else 'bits'}" for bits, count in at)


def receipt_sheet(receipt: dict[str, object]) -> Sheet:
    return Sheet("Receipt", ("what", "in force"), list(_flat(receipt)))


def _counter_row(layer: int | str, counts: dict[str, int]) -> tuple:
    return (str(layer), counts["requests"], hit_rate(counts), *(counts[name] for name in _COUNTED))


def _flat(values: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value not in (None, [], {}):
            yield f"{prefix}{name}", "; ".join(value) if isinstance(value, list) else value


def _answer(session: Session, prompt: torch.Tensor, sampling: Sampling, *, echo: bool) -> Answer:
    first_pass = len(session.controller.counters.passes)
    timing, tokens = Timing(), []
    generated = session.generate(prompt, sampling)
    for token in _echoed(session, generated) if echo else generated:
        timing.seconds.append(token.seconds)
        tokens.append(token.token_id)
    return Answer(
        token_ids=tokens,
        text=_tokenizer(session).decode(tokens, skip_special_tokens=True),
        effort=effort(session, first_pass=first_pass),
        timing=timing,
        receipt=session.receipt(),
    )


def _echoed(session: Session, tokens: Iterator[Token]) -> Iterator[Token]:
    """Pass tokens on; print what they add to the text once it can no longer change."""
    text = Text(_tokenizer(session))
    for token in tokens:
        print(text.add(token.token_id), end="", flush=True)
        yield token
    print(text.rest())


def _ask() -> str | None:
    """The next line that is not blank; None at the end."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return next((line.strip() for line in sys.stdin if line.strip()), None)
    except UnicodeDecodeError:
        raise BadInput("what came on stdin is not text in UTF-8: convert it") from None


def _tokenizer(session: Session) -> PreTrainedTokenizerBase:
    if session.opened.tokenizer is None:
        raise BadInput("the checkpoint has no tokenizer: put tokenizer.json beside it")
    return session.opened.tokenizer
