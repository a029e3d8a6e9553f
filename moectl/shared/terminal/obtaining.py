"""Models that a command needs: told and downloaded if they are only on the hub. Nothing here
imports torch."""

import sys
from pathlib import Path

from artifacts.common.untrusted import existing
from moectl.shared.terminal.waiting import Waiting
from runtime.model.files.hub.quants import SeveralQuants
from runtime.model.files.hub.repository import Download
from runtime.model.files.locate import Here, check_name, find


def obtain(name: str) -> Path:
    """Return the path of a model as `locate` does, downloaded first if it is only on the hub. Its
    bytes and the free ones are told on stderr before the download, and the progress on a terminal.

    Raises BadInput for a name that is no model's; where a repository has several models they are
    listed on stderr first. Raises OutOfResources for a disk that is too small.
    """
    found = _looked_for(name)
    missing = found.missing_nbytes
    if missing:
        _tell(found, missing)
        with Waiting(
            f"Downloading {name}", nbytes=missing, is_quiet=True, done=lambda: found.kept_nbytes
        ):
            return found.fetch()
    return found.fetch()


def _looked_for(name: str) -> Here | Download:
    if existing(name):
        return find(name)
    check_name(name)
    try:
        with Waiting(f"Looking for {name} on the hub", is_quiet=True):
            return find(name)
    except SeveralQuants as several:
        for quant in several.quants:
            size = f"{quant.nbytes / 2**30:8.1f} GiB"
            print(f"{several.repo}:{quant.name:<16} {size}", file=sys.stderr)
        raise


def _tell(found: Download, missing: int) -> None:
    """Say what is downloaded, how large it is, and how much room there is; huggingface_hub's own
    bars are not shown."""
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    print(
        f"Downloading {found.name}: {missing / 2**30:.1f} GiB to {found.cache.parent}, which has "
        f"{found.free_nbytes / 2**30:.1f} GiB free",
        file=sys.stderr,
    )
