"""`moectl inspect store --verify`: compare every row and every replica file with what the runs
recorded."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from artifacts.errors import BadUsage
from artifacts.store.check import Checked, check_store
from artifacts.store.store import Store
from moectl.shared.terminal.exit_codes import DONE, INPUT, PARTLY
from moectl.show.render import Sheet, console, show_json, show_sheet


@dataclass(frozen=True, slots=True)
class Verified:
    """A store and the result of its check."""

    store: Path
    checked: Checked

    @property
    def exit_code(self) -> int:
        """3 where something is lost or damaged, 6 where only unfinished work is left over."""
        findings = self.checked.findings
        return (
            INPUT if any(finding.is_loss for finding in findings) else PARTLY if findings else DONE
        )


def refuse_views(*, heatmap: bool, layer: int | None, run: int | None) -> None:
    """Raise BadUsage for options that show a part of a store only."""
    if heatmap or layer is not None or run is not None:
        raise BadUsage(
            "inspect store --verify looks at all of a store: leave --run, --layer and --heatmap out"
        )


def verified(store: Path, *, model: str | None) -> Verified:
    """Check a store, and compare it with a checkpoint, a folder or hub id, if one is named.

    Raises BadInput, Incompatible and OutOfResources when the store or the checkpoint cannot be
    opened.
    """
    with Store.open(store, read_only=True) as opened:
        checked = check_store(opened)
        if model is not None:
            # imports torch, which a store alone does not need
            from moectl.commands.inspect.comparing import compared

            checked = replace(checked, findings=(*checked.findings, *compared(opened, model)))
        return Verified(store, checked)


def show(result: Verified, *, as_json: bool) -> None:
    """Print a line for each finding, or one JSON object."""
    checked = result.checked
    if as_json:
        sizes = {
            "runs": checked.num_runs,
            "rows": checked.num_rows,
            "replica_files": checked.num_files,
        }
        findings = [asdict(finding) for finding in checked.findings]
        show_json({"name": "store", "store": str(result.store), **sizes, "findings": findings})
        return
    looked = (
        f"{checked.num_runs:,} runs, {checked.num_rows:,} rows and {checked.num_files:,} replica "
        "files were read"
    )
    rows = [(finding.about, finding.says, finding.remedy) for finding in checked.findings]
    note = f"{looked}: {len(rows) or 'no'} finding{'s' * (len(rows) != 1)}"
    if rows:
        show_sheet(
            Sheet(str(result.store), ("about", "what there is", "what mends it"), rows, note)
        )
    else:
        console().print(f"{result.store}: {note}", markup=False)
