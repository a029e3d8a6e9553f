"""The drafting oracle as a table: a row for each setting and number of drafts."""

from dataclasses import asdict

from artifacts.errors import BadUsage
from moectl.show import grounds
from moectl.show.render import NumBytes, Sheet, show_json, show_sheet
from runtime.replay.drafting import DraftChoice, Drafts, best_draft
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload


def parse_lengths(text: str) -> range:
    """Parse `0-8` or `4`. Raises BadUsage."""
    first, _, last = text.partition("-")
    if not (first.isdigit() and (last or first).isdigit()):
        raise BadUsage(f"--drafts {text!r}: write a number, or a range as 0-8")
    return range(int(first), int(last or first) + 1)


def parse_acceptance(text: str) -> tuple[float, ...]:
    """Parse `.7`, or one number for each draft as `.8,.7,.5`. Raises BadUsage."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise BadUsage(f"--acceptance {text!r}: write .7, or .8,.7,.5 draft by draft") from None


def show_drafts(
    workload: Workload,
    settings: list[Setting],
    drafts: Drafts,
    lengths: range,
    *,
    source: str,
    as_json: bool,
) -> None:
    """Print the rows of each setting, the fastest marked."""
    choices = {one.label: best_draft(workload, one, drafts, lengths=lengths) for one in settings}
    if as_json:
        show_json({name: asdict(choice) for name, choice in choices.items()})
        return
    title = f"Drafts for {source} on {workload.machine.name}, on virtual time"
    ground = grounds.simulated(workload.machine.name, workload.model.shape.nbytes)
    show_sheet(_sheet(title, choices, drafts, ground))
    for line in dict.fromkeys(line for choice in choices.values() for line in choice.assumed):
        print(f"assumed: {line}")


def _sheet(
    title: str, choices: dict[str, DraftChoice], drafts: Drafts, ground: grounds.Grounds
) -> Sheet:
    time = "ms a token" if ground.is_absolute else "time, no drafts = 1"
    columns = ("policies", "drafts", time, "best", "tokens a pass", "experts a layer")
    rows = [
        row
        for name, choice in choices.items()
        for row in _rows(name, choice, is_absolute=ground.is_absolute)
    ]
    chances = ", ".join(f"{chance:g}" for chance in drafts.acceptance)
    note = (
        f"{ground.says}; a draft is right with probability {chances} (assumed, seed {drafts.seed}) "
        f"and takes {1e3 * drafts.draft_s:g} ms to make (assumed)"
    )
    return Sheet(title, (*columns, "misses a token", "bytes a token"), rows, note)


def _rows(name: str, choice: DraftChoice, *, is_absolute: bool) -> list[tuple]:
    unit_s = 1e-3 if is_absolute else choice.rows[0].seconds_per_token
    return [
        (
            name,
            row.num_drafts,
            float(f"{row.seconds_per_token / unit_s:.4g}"),
            "fastest" * (row.num_drafts == choice.length),
            float(f"{row.tokens_per_pass:.3g}"),
            float(f"{row.experts_per_layer:.3g}"),
            float(f"{row.misses_per_token:.4g}"),
            NumBytes(row.nbytes_per_token),
        )
        for row in choice.rows
    ]
