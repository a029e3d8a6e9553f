"""`moectl run`: generate from a prompt, or chat, with a model whose experts are offloaded; print what that took."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from time import perf_counter

from artifacts.common.files import check_writable
from artifacts.errors import BadInput, BadUsage
from artifacts.store.runs import utc_now
from moectl.bundled import demo_model
from moectl.shared.opening import existing, model_info, quieten
from moectl.show.counters import counters_sheet, devices_sheet
from moectl.show.render import Sheet, human_bytes, show_json, show_sheet
from runtime.control.counters import AT_BITS
from runtime.session.answers import Answer, Stream
from runtime.session.generate import Sampling
from runtime.session.learn_maps import write_learned_maps
from runtime.session.session import Session, Settings


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
    """Do all of `moectl run`: one prompt or a chat, then the counters and the receipt."""
    if is_chat == (prompt is not None):
        raise BadUsage("give either --prompt TEXT or --chat")
    if is_chat and (as_json or trace):
        raise BadUsage("--json and --trace go with --prompt, not with --chat")
    if is_chat and sys.stdin is None:
        raise BadUsage("--chat reads turns from stdin, which is closed")
    if trace:
        check_writable(trace)
    name = name or str(demo_model())
    if settings.learn:
        from moectl.shared.stores import check_store

        check_store(store)
    quieten()
    with (
        Session.open(name, settings, store=existing(store), base=base) as session,
        keeping_maps(session, name, store=store),
    ):
        if is_chat:
            for answer in chat(session, sampling):
                print(took(answer), file=sys.stderr)
            show_sheet(counters_sheet(session.effort()))
            _show_receipt(session.receipt())
        else:
            show(run(session, prompt, sampling, echo=not as_json, trace=trace), as_json=as_json)


@contextmanager
def keeping_maps(session: Session, name: str, *, store: Path) -> Iterator[None]:
    """Store the maps that the session has learned when the block ends, also after an interruption; whole iterations
    only, and none where the checkpoint was written into: the last may be of two models."""
    started_at, begin_s = utc_now(), perf_counter()
    try:
        yield
    finally:
        if session.parts.settings.learn:
            session.parts.tiers.slow.check_unchanged()
            _keep_maps(session, name, store, started_at, perf_counter() - begin_s)


def _keep_maps(session: Session, name: str, store: Path, started_at: datetime, seconds: float) -> None:
    kept = write_learned_maps(
        session.parts.policies.matching.learned(),
        store_path=store,
        model=model_info(name, session.opened),
        began_with=session.parts.maps_run,
        started_at=started_at,
        seconds=seconds,
    )
    if kept is None:  # the run ended within its first pass, with a message of its own
        return
    others = f"; run {kept.others} had learned meanwhile: its maps are among them" if kept.others else ""
    line = f"learned from {kept.num_iterations:,} iterations: run {kept.run_id} of {store} holds {kept.num_maps:,} maps"
    print(line + others, file=sys.stderr)


def run(session: Session, prompt: str, sampling: Sampling, *, echo: bool, trace: Path | None = None) -> Answer:
    """Generate after `prompt`; with `echo` print the text to stdout as it is generated."""
    recorder = session.record() if trace else None
    answer = _answered(session.stream(prompt, sampling), echo=echo)
    if recorder:
        from artifacts.traces.parquet import write_parquet  # late, as the store: most runs write nothing

        write_parquet(recorder.trace(), trace)
    return answer


def chat(session: Session, sampling: Sampling) -> Iterator[Answer]:
    """Read turns from stdin until it ends and answer each on stdout; the whole conversation is the prompt."""
    turns: list[dict[str, str]] = []
    while (line := _ask()) is not None:
        turns.append({"role": "user", "content": line})
        answer = _answered(session.stream(turns, sampling), echo=True)
        turns.append({"role": "assistant", "content": answer.text})
        yield answer
        session.fold()


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
                "ttft_ms": answer.ttft_ms,
                "tpot_ms": answer.tpot_ms,
            }
        )
        return
    print()
    show_sheet(counters_sheet(answer.effort, note=took(answer)))
    _show_receipt(answer.receipt)


def took(answer: Answer) -> str:
    """Describe the cost of an answer in one line."""
    counts = answer.effort.counters
    return (
        f"{len(answer.token_ids)} tokens; first after {answer.ttft_ms:.1f} ms, then {answer.tpot_ms:.2f} ms each; "
        f"{human_bytes(counts['demand_bytes'])} on demand, {human_bytes(counts['prefetch_bytes'])} prefetched "
        f"({human_bytes(counts['wasted_bytes'])} of it wasted), {answer.effort.exposed_ms:.1f} ms of stall; "
        f"{counts['replaced_ranks']} ranks replaced, {counts['dropped_ranks']} dropped{_few_bits(counts)}"
    )


def _few_bits(counts: dict[str, int]) -> str:
    """Return how many experts were computed below full precision, empty if none were."""
    at = [(bits, counts[name]) for bits, name in AT_BITS.items() if counts[name]]
    return "".join(f"; {count} experts at {bits} {'bit' if bits == 1 else 'bits'}" for bits, count in at)


def _show_receipt(receipt: dict[str, object]) -> None:
    """Print the receipt; several devices have a table of their own."""
    if devices := receipt["devices"]:
        show_sheet(devices_sheet(devices))
    others = {name: value for name, value in receipt.items() if name != "devices"}
    show_sheet(Sheet("Receipt", ("what", "in force"), list(_flat(others))))


def _flat(values: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value not in (None, [], {}):
            yield f"{prefix}{name}", "; ".join(value) if isinstance(value, list) else value


def _answered(stream: Stream, *, echo: bool) -> Answer:
    if echo:
        for piece in stream:
            print(piece, end="", flush=True)
        print()
    return stream.answer()


def _ask() -> str | None:
    """Return the next line that is not blank, None at the end of stdin."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return next((line.strip() for line in sys.stdin if line.strip()), None)
    except UnicodeDecodeError:
        encoding = sys.stdin.encoding.upper()
        raise BadInput(f"what came on stdin is not text in {encoding}: convert it, or set PYTHONIOENCODING") from None
    except OSError as error:  # a folder, a terminal that is gone
        raise BadInput(f"stdin cannot be read: {error.strerror}") from None
