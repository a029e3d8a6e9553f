"""Checkpoints whose weights change while they are in use, in place or by another file of their
name, and folders that cannot be written into."""

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from artifacts.errors import BadInput, Incompatible
from artifacts.quantisation.replica_file import replica_root
from artifacts.store.runs import ModelInfo
from profilers.quantise.method import Method
from profilers.quantise.replicas import BuiltReplicas, build_replicas
from profilers.text.batches import Data
from runtime.model.files.checkpoint import open_checkpoint
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session
from tests.helpers.families import VOCABULARY
from tests.helpers.read_only import read_only
from tests.helpers.rewritten import invert
from tools.torments.cases import Lost
from tools.torments.lossless import Model, Models, described, differs, draw_settings, is_exact, said

_CHANGED = "changed while it is in use"
_PASSES = 3  # requests while the weights change


class Rewritten:
    """A request is the old model's to the bit or is refused, and an artefact is of one checkpoint
    or absent."""

    classes = (10,)
    share = 2.0

    def __init__(self, ground: Path) -> None:
        torch.set_num_threads(1)
        self._ground = ground
        self._models = Models(ground / "models")
        self._kinds: dict[str, tuple[float, Callable[[Model, Path, random.Random], None]]] = {
            "10: a checkpoint written into during a run": (8, self._during_a_run),
            "10: a checkpoint replaced during a run": (8, self._replaced),
            "10: a checkpoint written into while it is quantised": (1, self._quantised),
            "10: another model's store": (1, self._other_store),
            "10: a read-only folder": (1, self._read_only),
        }

    def one(self, rng: random.Random) -> str:
        kinds = list(self._kinds)
        kind = rng.choices(kinds, [self._kinds[name][0] for name in kinds])[0]
        model = self._models.draw(rng)
        work = self._ground / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        self._kinds[kind][1](model, Path(shutil.copytree(model.folder, work / "model")), rng)
        return kind

    def _during_a_run(self, model: Model, folder: Path, rng: random.Random) -> None:
        with (
            _session(folder, rng) as session,
            _meanwhile(rng, lambda: invert(folder, _expert(folder, rng))),
        ):
            is_on_disk = session.parts.settings.link == "disk"
            _ask(model, session, rng, may_refuse=is_on_disk)

    def _replaced(self, model: Model, folder: Path, rng: random.Random) -> None:
        other = Path(shutil.copytree(folder, folder.with_name("other")))
        invert(other, _expert(other, rng))

        def replace() -> None:
            for path in sorted(other.glob("*.safetensors")):
                path.rename(folder / path.name)

        with _session(folder, rng) as session:
            with _meanwhile(rng, replace):
                _ask(model, session, rng, may_refuse=False)
            if open_model(str(folder)).fingerprint == session.opened.fingerprint:
                raise Lost("10: other weights have the same fingerprint")

    def _quantised(self, model: Model, folder: Path, rng: random.Random) -> None:
        opened = open_model(str(folder))
        name = _expert(folder, rng)
        at = rng.randint(1, opened.shape.num_keys)
        store = folder.with_name("moe.duckdb")
        try:
            _quantise(opened, store, progress=lambda done, _: done == at and invert(folder, name))
            raise Lost(f"10: {name} was changed after {at} experts, and the run is complete")
        except BadInput as problem:
            if _CHANGED not in str(problem) or store.exists():
                raise Lost(f"10: {problem}") from problem
        invert(folder, name)
        _quantise(open_model(str(folder)), store)
        _quantise(open_model(str(model.folder)), whole := folder.with_name("whole.duckdb"))
        if _files(store) != _files(whole):
            raise Lost(
                f"10: {name} was changed after {at} experts and changed back, and the replicas "
                "are others"
            )

    def _other_store(self, model: Model, folder: Path, rng: random.Random) -> None:
        store = folder.with_name("moe.duckdb")
        name = _expert(folder, rng)
        _quantise(open_model(str(folder)), store)
        invert(folder, name)
        try:
            Session.open(folder, store=store, base=4)
            raise Lost(f"10: a store from before {name} was changed serves replicas")
        except Incompatible as problem:
            if "not" not in str(problem) or "\n" in str(problem):
                raise Lost(f"10: {problem}") from problem
        if resumed := _quantise(open_model(str(folder)), store).resumed:
            raise Lost(f"10: {resumed} replicas of another model were taken up")

    def _read_only(self, model: Model, folder: Path, rng: random.Random) -> None:
        before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
        with read_only(folder):
            with _session(folder, rng) as session:
                _ask(model, session, rng, may_refuse=False)
            _quantise(open_model(str(folder)), folder.with_name("moe.duckdb"))
        if {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} != before:
            raise Lost("10: the checkpoint's folder has changed")


def _session(folder: Path, rng: random.Random) -> Session:
    opened = open_model(str(folder))
    return Session(opened, draw_settings(rng, opened.shape))


def _ask(model: Model, session: Session, rng: random.Random, *, may_refuse: bool) -> None:
    for _ in range(_PASSES):
        request = rng.choice(model.requests)
        try:
            ours = said(session, request)
        except BadInput as problem:
            if may_refuse and _CHANGED in str(problem):
                return
            raise Lost(
                f"10: {model.name}, {described(session.parts.settings)}: {problem}"
            ) from problem
        is_owed = is_exact(session) or model.opened.dtype is torch.float32
        if is_owed and (difference := differs(ours, request.logits, to_the_bit=is_exact(session))):
            raise Lost(f"10: {model.name}, {described(session.parts.settings)}: {difference}")


@contextmanager
def _meanwhile(rng: random.Random, change: Callable[[], None]) -> Iterator[None]:
    """Make the change at a random moment within a few passes, or at once."""
    delay_s = rng.choice((0.0, rng.uniform(0, 0.1)))

    def later() -> None:
        time.sleep(delay_s)
        change()

    if not delay_s:
        change()
        yield
        return
    thread = threading.Thread(target=later)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _expert(folder: Path, rng: random.Random) -> str:
    """The name of a tensor of experts."""
    checkpoint = open_checkpoint(folder)
    names = sorted(name for name in checkpoint.tensors if "expert" in name and "bias" not in name)
    checkpoint.close()
    return rng.choice(names)


def _quantise(
    opened: MoeModel,
    store: Path,
    *,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> BuiltReplicas:
    text = Data(
        "test", [np.random.default_rng(0).integers(3, VOCABULARY, length) for length in (20, 31, 9)]
    )
    model = ModelInfo("model", opened.fingerprint, opened.family, opened.shape)
    return build_replicas(
        opened, text, Method(bits=(4,)), model=model, store_path=store, progress=progress
    )


def _files(store: Path) -> dict[str, bytes]:
    found = sorted(replica_root(store).rglob("L*.safetensors"))
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in found}
