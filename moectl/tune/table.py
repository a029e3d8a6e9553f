"""The result of a search for policies as tables, a plot in characters, and JSON."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from artifacts.hardware.machines import machine
from moectl.bundled import is_bundled
from moectl.show.grounds import Grounds, compared, measured
from moectl.show.losses import is_distinguishable, loss_words
from moectl.show.render import Sheet, console, show_json, show_sheet
from moectl.tune.result import LEFT_OUT, Pick, Tuned, published_of_others
from profilers.compare.bench import Quartiles
from profilers.compare.verify_search import CandidateQuality, MeasuredBeside
from runtime.control.counters import altered, is_exact
from runtime.search.results import Tried
from runtime.search.space import Combination

_WIDTH = 64
_HEIGHT = 14
_MOST = 16  # rows of the front


def show(tuned: Tuned, *, as_json: bool) -> None:
    """Print tables and a plot, or one JSON object."""
    if as_json:
        show_json(record(tuned))
        return
    out = console()
    show_sheet(_answers(tuned))
    for line in _told_of_answers(tuned):
        out.print(line, markup=False)
    show_sheet(_beside(tuned))
    show_sheet(_front(tuned))
    for line in plot(
        tuned.found.front(), [pick.tried for pick in tuned.picks], full_ms=tuned.full_ms
    ):
        out.print(line, markup=False, no_wrap=True)
    if tuned.checks:
        show_sheet(_checks(tuned))
    show_sheet(
        Sheet("Receipt", ("what", "in force"), [(name, str(value)) for name, value in _told(tuned)])
    )


def record(tuned: Tuned) -> dict[str, object]:
    """The result as JSON values."""
    return {
        "run": tuned.run,
        "why": tuned.why,
        "oracle_ms": tuned.oracle_ms,
        "full_ms": tuned.full_ms,
        "front": [_tried(one) for one in tuned.found.front()],
        "published": {name: _tried(one) for name, one in tuned.found.published.items()},
        "live": {
            name: asdict(one) | {"is_exact": _is_exact(one)} for name, one in tuned.live.items()
        },
        "picks": [asdict(pick) | {"tried": _tried(pick.tried)} for pick in tuned.picks],
        "checks": [asdict(check) for check in tuned.checks],
        "receipt": dict(tuned.receipt),
        "asked": asdict(tuned.request),
    }


def _tried(one: Tried) -> dict[str, object]:
    return asdict(one) | {"combination": one.combination._asdict(), "is_lossless": one.is_lossless}


def _grounds(tuned: Tuned) -> Grounds:
    """Return the grounds of live times: this machine, an emulated link, or the proportions of
    another machine."""
    return measured(
        tuned.request.link
        if tuned.request.scaled_to is None
        else machine(tuned.request.scaled_to).name
    )


def _answers(tuned: Tuned) -> Sheet:
    columns = ("preset", "policies", "beside full", "loss")
    title = f"Tuned: {tuned.request.budget} of the experts, {tuned.request.machine_name}"
    note = (
        f"beside full: a token's time beside that of all experts resident, {_grounds(tuned).says}"
    )
    return Sheet(title, columns, [_answer(pick) for pick in tuned.picks], note)


def _answer(pick: Pick) -> tuple:
    tried = pick.tried
    quality = pick.quality
    live = pick.live
    loss = "exact" if tried.is_lossless else _measured_loss(quality)
    policies = f"{described(tried.combination)}, {tried.combination.scope}"
    return pick.name, policies, compared(live.to_full) if live else None, loss


def _told_of_answers(tuned: Tuned) -> Iterator[str]:
    """Yield lines on the answers: why no answer loses something, picks whose loss is near the
    limit, what there was no time for, and the command that runs the answer."""
    asked = tuned.request
    model = str(tuned.receipt["model"])
    if tuned.why:
        yield f"within {100 * asked.max_loss:g} % of perplexity: {tuned.why}"
    for pick in tuned.picks:
        if not pick.tried.is_lossless and pick.quality and _is_near(pick.quality, asked.max_loss):
            yield (
                f"{pick.name}: its loss is within two standard errors of the "
                f"{100 * asked.max_loss:g} % that it may lose, so that other text may say "
                "otherwise: more --tokens tell"
            )
    if left_out := tuned.receipt.get(LEFT_OUT):
        yield f"{LEFT_OUT} ({asked.minutes:g} minutes): {'; '.join(left_out)}"
    named = "" if is_bundled(model) else f" {shlex.quote(model)}"
    yield f"kept in run {tuned.run}: moectl run{named} --preset {asked.name}"


def _beside(tuned: Tuned) -> Sheet:
    """Return a table of the live measurements: exact presets first, then those that alter the
    output, each by time."""
    grounds = _grounds(tuned)
    ms = ("ms/token",) if grounds.is_absolute else ()
    columns = ("preset", "output", "beside full", *ms, "rounds", "hit rate", "loss")
    rows = []
    for name, live in sorted(
        tuned.live.items(), key=lambda pair: (not _is_exact(pair[1]), pair[1].to_full)
    ):
        found = live.measured
        counters = live.measured.counters
        rows.append(
            (
                name,
                "exact" if _is_exact(live) else "altered",
                compared(live.to_full),
                *((_spread(found.tpot_ms),) if ms else ()),
                live.num_rounds,
                counters["hits"] / max(1, counters["requests"]),
                None
                if _is_exact(live)
                else loss_words(found.perplexity_ratio - 1, found.loss_error),
            )
        )
    quartiles = " (quartiles)" if ms else ""
    note = (
        f"{grounds.says}; medians{quartiles} over rounds in random order; losses of the few "
        "tokens that are timed"
    )
    return Sheet("Live, beside each other", columns, rows, note)


def _is_exact(live: MeasuredBeside) -> bool:
    return is_exact(altered(live.measured.counters))


def _front(tuned: Tuned) -> Sheet:
    """The Pareto front in time, loss and memory, and the best published presets for comparison."""
    front = tuned.found.front()
    columns = ("policies", "beside full", "predicted loss %", "measured loss")
    rows = [
        _point(tuned, f"{described(one.combination)}, {one.combination.scope}", one)
        for one in front[:_MOST]
    ]
    published = published_of_others(tuned.found)
    best = sorted(
        (name for name in published if published[name].is_lossless),
        key=lambda name: published[name].ms,
    )
    rows += [_point(tuned, f"published: {name}", published[name]) for name in best[:3]]
    shown = f", the fastest {_MOST} of them shown" if len(front) > _MOST else ""
    note = (
        f"combinations that nothing beats in time, loss and memory together: {len(front)}{shown}; "
        f"an oracle that knows the future: {compared(tuned.oracle_ms / tuned.full_ms)}"
    )
    return Sheet("Pareto front, simulated at measured costs", columns, rows, note)


def _point(tuned: Tuned, name: str, one: Tried) -> tuple:
    quality = tuned.qualities.get(one.combination)
    return name, compared(one.ms / tuned.full_ms), _percent(one.loss), _measured_loss(quality)


def _checks(tuned: Tuned) -> Sheet:
    columns = (
        "preset",
        "ahead of the best published %",
        "on other text %",
        "advantage lost, points",
    )
    rows = [
        (one.name, 100 * one.here, 100 * one.there, 100 * (one.here - one.there))
        for one in tuned.checks
    ]
    other = ", ".join(dict.fromkeys(one.other for one in tuned.checks))
    note = f"simulated, against presets of as small a loss; other text: {other}"
    return Sheet("Tuned on one text, tried on another", columns, rows, note)


def _told(tuned: Tuned) -> Iterator[tuple[str, object]]:
    for name, value in tuned.receipt.items():
        if value == []:
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key} {inner}" for key, inner in value.items())
        yield name, "; ".join(value) if isinstance(value, list) else value


def described(one: Combination) -> str:
    """The policies that differ from on-demand, as text."""
    plain = Combination()
    changed = [
        f"{axis} {text}" for axis, text in one.policies.items() if text != getattr(plain, axis)
    ]
    return ", ".join(changed) or "on demand"


def plot(front: Sequence[Tried], picks: Sequence[Tried], *, full_ms: float) -> list[str]:
    """The front in characters: time to the right, in times of the full model's, loss upwards, picks
    as *. Nothing where nothing loses."""
    points = [one for one in (*front, *picks) if one.loss is not None]
    if not any(one.loss for one in points):
        return []
    most_ms = max(one.ms for one in points)
    most_loss = max(one.loss for one in points)
    cells = [[" "] * (_WIDTH + 1) for _ in range(_HEIGHT + 1)]
    for one, mark in (*((one, "o") for one in front), *((one, "*") for one in picks)):
        if one.loss is not None:
            cells[_HEIGHT - round(_HEIGHT * one.loss / most_loss)][
                round(_WIDTH * one.ms / most_ms)
            ] = mark
    lines = [
        f"{'loss %' if row == 0 else '':>8} |{''.join(line)}" for row, line in enumerate(cells)
    ]
    lines[0] = f"{100 * most_loss:7.3g}% |{''.join(cells[0])}"
    lines[-1] = f"{0:7}% |{''.join(cells[-1])}"
    axis = f"{'time of a token, full = 1':^{_WIDTH - 8}}{most_ms / full_ms:8.3g}"
    return [*lines, f"{'':8} +{'-' * (_WIDTH + 1)}", f"{'':10}0{axis}"]


def _is_near(quality: CandidateQuality, max_loss: float) -> bool:
    """Return whether the tokens that were read are too few to tell the loss from the largest
    allowed one."""
    return not is_distinguishable(quality.loss - max_loss, quality.loss_error)


def _measured_loss(quality: CandidateQuality | None) -> str | None:
    return quality and loss_words(quality.loss, quality.loss_error)


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 4)


def _spread(found: Quartiles) -> str:
    return f"{found.median:.2f} ({found.lower:.2f} to {found.upper:.2f})"
