"""The result of a search for policies as tables, a plot in characters, and JSON."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from moectl.bundled import is_bundled
from moectl.show.render import NumBytes, Sheet, console, show_json, show_sheet
from moectl.tune.result import Pick, Tuned, published_of_others
from profilers.compare.bench import Quartiles
from runtime.search.results import Tried
from runtime.search.space import Combination

_WIDTH, _HEIGHT = 64, 14
_MOST = 16  # rows of the front


def show(tuned: Tuned, *, as_json: bool) -> None:
    """Print tables and a plot, or one JSON object."""
    if as_json:
        show_json(record(tuned))
        return
    show_sheet(_answers(tuned))
    show_sheet(_beside(tuned))
    show_sheet(_front(tuned))
    out = console()
    for line in plot(tuned.found.front(), [pick.tried for pick in tuned.picks]):
        out.print(line, markup=False, no_wrap=True)
    if tuned.checks:
        show_sheet(_checks(tuned))
    show_sheet(Sheet("Receipt", ("what", "in force"), [(name, str(value)) for name, value in _told(tuned)]))


def record(tuned: Tuned) -> dict[str, object]:
    """The result as JSON values."""
    return {
        "run": tuned.run,
        "why": tuned.why,
        "oracle_ms": tuned.oracle_ms,
        "full_ms": tuned.full_ms,
        "front": [_tried(one) for one in tuned.found.front()],
        "published": {name: _tried(one) for name, one in tuned.found.published.items()},
        "live": {name: asdict(one) for name, one in tuned.live.items()},
        "picks": [asdict(pick) | {"tried": _tried(pick.tried)} for pick in tuned.picks],
        "checks": [asdict(check) for check in tuned.checks],
        "receipt": dict(tuned.receipt),
        "asked": asdict(tuned.request),
    }


def _tried(one: Tried) -> dict[str, object]:
    return asdict(one) | {"combination": one.combination._asdict(), "is_lossless": one.is_lossless}


def _answers(tuned: Tuned) -> Sheet:
    columns = ("preset", "policies", "scope", "predicted ms", "live ms", "x full", "x oracle", "predicted loss %")
    columns += ("measured loss %", "KL", "top-1", "stall ms", "fast tier")
    rows = [_answer(tuned, pick) for pick in tuned.picks]
    asked, model = tuned.request, str(tuned.receipt["model"])
    named = "" if is_bundled(model) else f" {shlex.quote(model)}"
    note = (
        f"{asked.budget} on {asked.machine_name}, at most {100 * asked.max_loss:g} % of perplexity; experts "
        f"{asked.experts}; kept in run {tuned.run}: moectl run{named} --preset {asked.name}; x full is live, of the "
        f"same rounds; x oracle predicted, of {tuned.oracle_ms:.3g} ms"
    )
    return Sheet("Tuned", columns, rows, ". ".join(filter(None, (note, tuned.why))))


def _answer(tuned: Tuned, pick: Pick) -> tuple:
    tried, quality, live = pick.tried, pick.quality, pick.live
    return (
        pick.name,
        described(tried.combination),
        tried.combination.scope,
        tried.ms,
        _spread(live.measured.tpot_ms) if live else None,
        live.to_full if live else None,
        tried.ms / tuned.oracle_ms,
        _percent(tried.loss),
        _percent(quality.loss) if quality else None,
        f"{quality.kl:.4f}" if quality else None,
        f"{quality.top1:.4f}" if quality else None,
        live.measured.exposed_ms if live else None,
        NumBytes(tried.fast_nbytes),
    )


def _beside(tuned: Tuned) -> Sheet:
    columns = ("preset", "live ms", "x full", "predicted ms", "hit rate", "loss %", "KL", "top-1", "stall ms")
    rows = []
    for name, live in sorted(tuned.live.items(), key=lambda pair: pair[1].to_full):
        found, counters = live.measured, live.measured.counters
        predicted = tuned.found.published.get(name) or _of_pick(tuned, name)
        rows.append(
            (
                name,
                _spread(found.tpot_ms),
                live.to_full,
                tuned.full_ms if name == "full" else predicted.ms if predicted else None,
                counters["hits"] / max(1, counters["requests"]),
                _percent(found.perplexity_ratio - 1),
                f"{found.kl:.4f}",
                f"{found.top1_agreement:.4f}",
                found.exposed_ms,
            )
        )
    num_rounds = max(one.num_rounds for one in tuned.live.values())
    note = (
        f"medians (quartiles) over {num_rounds} rounds in random order; x full: the median over rounds; "
        f"predicted oracle {tuned.oracle_ms:.3g} ms. Losses here are of the few tokens that are timed, those above "
        "of all held-out tokens"
    )
    return Sheet("Live, beside each other", columns, rows, note)


def _of_pick(tuned: Tuned, name: str) -> Tried | None:
    return next((pick.tried for pick in tuned.picks if pick.name == name), None)


def _front(tuned: Tuned) -> Sheet:
    """The Pareto front in time, loss and memory, and the best published presets for comparison."""
    front = tuned.found.front()
    columns = ("policies", "scope", "predicted ms", "predicted loss %", "measured loss %", "fast tier", "hit rate")
    rows = [_point(tuned, described(one.combination), one) for one in front[:_MOST]]
    published = published_of_others(tuned.found)
    best = sorted((name for name in published if published[name].is_lossless), key=lambda name: published[name].ms)
    rows += [_point(tuned, f"published: {name}", published[name]) for name in best[:3]]
    note = f"{len(front)} combinations that nothing beats in time, loss and memory together" + (
        f", the fastest {_MOST} of them shown" if len(front) > _MOST else ""
    )
    return Sheet("Pareto front", columns, rows, note)


def _point(tuned: Tuned, name: str, one: Tried) -> tuple:
    measured = tuned.qualities.get(one.combination)
    loss = _percent(measured.loss) if measured else None
    return name, one.combination.scope, one.ms, _percent(one.loss), loss, NumBytes(one.fast_nbytes), one.hit_rate


def _checks(tuned: Tuned) -> Sheet:
    columns = ("preset", "ahead of the best published %", "on other text %", "advantage lost, points", "other text")
    rows = [
        (one.name, 100 * one.here, 100 * one.there, 100 * (one.here - one.there), one.other) for one in tuned.checks
    ]
    return Sheet("Tuned on one text, tried on another", columns, rows, "by replay, against presets of as small a loss")


def _told(tuned: Tuned) -> Iterator[tuple[str, object]]:
    for name, value in tuned.receipt.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {inner}" for key, inner in value.items())
        yield name, "; ".join(value) if isinstance(value, list) else value


def described(one: Combination) -> str:
    """The policies that differ from on-demand, as text."""
    plain = Combination()
    changed = [f"{axis} {text}" for axis, text in one.policies.items() if text != getattr(plain, axis)]
    return ", ".join(changed) or "on demand"


def plot(front: Sequence[Tried], picks: Sequence[Tried]) -> list[str]:
    """The front in characters: time to the right, loss upwards, picks as *."""
    points = [one for one in (*front, *picks) if one.loss is not None]
    if not points:
        return []
    most_ms, most_loss = max(one.ms for one in points), max(max(one.loss for one in points), 1e-9)
    cells = [[" "] * (_WIDTH + 1) for _ in range(_HEIGHT + 1)]
    for one, mark in (*((one, "o") for one in front), *((one, "*") for one in picks)):
        if one.loss is not None:
            cells[_HEIGHT - round(_HEIGHT * one.loss / most_loss)][round(_WIDTH * one.ms / most_ms)] = mark
    lines = [f"{'loss %' if row == 0 else '':>8} |{''.join(line)}" for row, line in enumerate(cells)]
    lines[0] = f"{100 * most_loss:7.3g}% |{''.join(cells[0])}"
    lines[-1] = f"{0:7}% |{''.join(cells[-1])}"
    return [*lines, f"{'':8} +{'-' * (_WIDTH + 1)}", f"{'':10}0{'ms a token':^{_WIDTH - 8}}{most_ms:8.3g}"]


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 4)


def _spread(found: Quartiles) -> str:
    return f"{found.median:.2f} ({found.lower:.2f} to {found.upper:.2f})"
