"""A live bench: rounds of samples on text. Each sample is kept at once, each setting written after
its last round."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from artifacts.errors import Problem
from artifacts.hardware.machines import MACHINES
from artifacts.modelshapes.kv_cache import AUTO
from artifacts.shape import FULL_BITS
from artifacts.store.runs import utc_now
from moectl.bench.ledger import LIVE, PEER, BenchJob, BenchRow, Ledger, artefact_runs, measured_row
from moectl.bench.request import BenchRequest
from moectl.bench.table import Benched, loss_of_base
from moectl.shared.opening import model_info, open_quietly
from moectl.shared.place_trace import dense_suffix
from moectl.shared.stores import check_store, stored_artefacts
from moectl.shared.terminal.progress import Phases, progress_bar
from moectl.shared.text import read_text
from moectl.show.grounds import Grounds
from moectl.show.grounds import measured as grounds_of
from profilers.compare.bench import (
    Bench,
    BenchSample,
    BenchSetting,
    BenchText,
    LinkEmulations,
    schedule,
    summary,
)
from profilers.compare.peers import PEERS, PeerBench
from profilers.compare.samples import KeptSamples
from profilers.compare.tasks import Tasks, TaskScore, load_tasks
from profilers.hardware.this_machine import LocalMachine
from profilers.text.corpus import data_digest, documents
from runtime.drafters.base import NONE, Draft, kind_of
from runtime.model.files.locate import locate
from runtime.model.open import MoeModel
from runtime.session.equip import model_on_base
from runtime.session.link_choice import resolve_link
from runtime.session.settings import FUSED

PEERS_AS_THEY_ARE = (
    "peers: other programs in processes of their own, on this machine as it is, whatever link is "
    "emulated for presets"
)
DRAFTED = (
    "drafts by {draft}: the prompts answered greedily with them and without, one after the other"
)
NO_ORACLE = "no oracle: nobody knows the future of a live run; --simulate has one"


def live(name: str, request: BenchRequest, phases: Phases, *, store: Path) -> Benched:
    """Measure every setting; resume where the same bench was stopped."""
    phases.begin("opening the model")
    torch.set_num_threads(request.threads)
    check_store(store)
    documents(request.data)  # a wrong path is reported before a model is opened
    checkpoint = open_quietly(name, device=request.device)
    measured = (
        checkpoint
        if request.dense is None
        else open_quietly(name, device=request.device, dense=request.dense)
    )
    opened, artefacts = model_on_base(
        measured, stored_artefacts(store, checkpoint, base=request.base), request.base
    )
    for link in set(request.link_names) - MACHINES.keys():
        resolve_link(opened, link=link, near=None, scaled_to=None)
    if request.draft != NONE:  # one that cannot be used is reported before anything is measured
        draft = Draft.parse(request.draft)
        kind_of(draft.name).open(opened, draft.argument)
    info = model_info(name, opened)
    request = request.of_model(store, info.model_id)
    text = read_text(
        opened, request.data, length=request.length, num_tokens=request.tokens, seed=request.seed
    )
    settings = request.settings()
    here = LocalMachine.look(opened.model.device)
    tasks = load_tasks(request.task_names) if request.task_names else None
    job = _job(
        request,
        text,
        settings,
        tasks,
        here=here,
        artefacts=artefact_runs(store, info.model_id),
        opened=opened,
    )
    ledger = Ledger(store, job, model=info)
    kept = KeptSamples(store, job.digest)
    if request.again:
        kept.remove()
    samples, known = kept.load()
    paces = LinkEmulations(opened, known, experts=request.experts)
    bench = Bench(
        opened,
        artefacts,
        text,
        paces,
        request.stored,
        devices=request.devices,
        kv_cache_dtype=request.kv_cache_dtype,
        activations=request.activations,
        draft=request.draft,
    )
    peers = PeerBench(opened, locate(name), text, threads=request.threads)
    finished = {} if request.again else ledger.finished()
    under_way = _UnderWay(bench, peers, ledger, kept, samples, finished, {}, tasks, request.batch)
    taken_up = len(under_way.rows)
    _measure(under_way, settings, request, phases, num_decoded=text.num_decoded)
    kept.remove()
    rows = [
        under_way.rows.get(setting) or _refused(setting, under_way.refused[setting])
        for setting in settings
    ]
    notes = [NO_ORACLE] + [PEERS_AS_THEY_ARE] * bool(request.peer_names)
    if request.draft != NONE:
        notes.append(DRAFTED.format(draft=request.draft))
    if text.shortfall:
        notes.append(f"only {text.shortfall}")
    own = {"kv_cache_dtype": request.kv_cache_dtype, "activations": request.activations}
    is_lossy = request.kv_cache_dtype != AUTO or request.activations
    if request.base != FULL_BITS or request.dense is not None or is_lossy:
        quality = bench.loss_of_base(checkpoint)
        notes.append(loss_of_base(quality, request.base, request.dense, **own))
    conditions = _conditions(request, text, here, taken_up, opened)
    return Benched(
        rows,
        opened.shape,
        _grounds(request, opened),
        request.asked,
        conditions,
        tuple(notes),
        job.digest,
    )


@dataclass(slots=True)
class _UnderWay:
    """The state of a running bench: samples by round and setting, rows of finished settings,
    reasons of refusal."""

    bench: Bench
    peers: PeerBench
    ledger: Ledger
    kept: KeptSamples
    samples: dict[tuple[int, BenchSetting], BenchSample]
    rows: dict[BenchSetting, BenchRow]
    refused: dict[BenchSetting, str]
    tasks: Tasks | None
    batch: int | None  # of requests of the tasks

    def sample(self, turn: int, setting: BenchSetting, progress: Callable[[int], None]) -> None:
        """Measure a setting once and keep the sample, or record why it cannot run."""
        try:
            is_peer = setting.preset in PEERS
            sample = (
                self.peers.measure(setting, self.bench.full)
                if is_peer
                else self.bench.measure(setting, progress)
            )
        except Problem as problem:
            self.refused[setting] = str(problem)
            return
        self.samples[turn, setting] = sample
        self.kept.add(turn, setting, sample, pace=self.bench.paces.of(setting.link))

    def finish(self, setting: BenchSetting, rounds: int) -> None:
        """Write a setting that has a sample of every round."""
        samples = [
            self.samples[turn, setting] for turn in range(rounds) if (turn, setting) in self.samples
        ]
        if len(samples) == rounds:
            load = LocalMachine.look(torch.device("cpu")).load
            measured = summary(samples)
            row = measured_row(setting, measured, scored=self.bench.num_scored)
            self.rows[setting] = self.ledger.write(
                replace(row, tasks=self._scores(setting)),
                by_layer=measured.by_layer,
                started_at=utc_now(),
                seconds=sum(sample.seconds for sample in samples),
                beside={
                    "pace": self.bench.paces.of(setting.link),
                    "load": load,
                    "by_text": {"kl": samples[0].kl_by_text, "loss": samples[0].loss_by_text},
                },
            )

    def _scores(self, setting: BenchSetting) -> tuple[TaskScore, ...]:
        """Scores of a preset; peers, which are other programs, have none."""
        has_none = self.tasks is None or setting.preset in PEERS
        return () if has_none else self.bench.scores(setting, self.tasks, batch=self.batch)


def _measure(
    under_way: _UnderWay,
    settings: Sequence[BenchSetting],
    request: BenchRequest,
    phases: Phases,
    *,
    num_decoded: int,
) -> None:
    order = [
        one
        for one in schedule(settings, rounds=request.rounds, seed=request.seed)
        if one[1] not in under_way.rows
    ]
    phases.begin("reading the text by the full model")
    if order:
        under_way.bench.read_full()
    phases.begin(f"measuring {len(settings)} settings in {request.rounds} rounds")
    with progress_bar("measuring", unit="tokens") as advance:
        for number, (turn, setting) in enumerate(order):
            if setting in under_way.refused:
                continue
            if (turn, setting) not in under_way.samples:
                before = number * num_decoded
                total = len(order) * num_decoded
                under_way.sample(
                    turn,
                    setting,
                    lambda done, before=before, total=total: advance(before + done, total),
                )
            under_way.finish(setting, request.rounds)


def _refused(setting: BenchSetting, why: str) -> BenchRow:
    return BenchRow(**asdict(setting), mode=PEER if setting.preset in PEERS else LIVE, why=why)


def _job(
    request: BenchRequest,
    text: BenchText,
    settings: Sequence[BenchSetting],
    tasks: Tasks | None,
    *,
    here: LocalMachine,
    artefacts: dict[str, int],
    opened: MoeModel,
) -> BenchJob:
    """The identity of this bench. It includes all settings, since their rounds are interleaved."""
    conditions = {
        "mode": LIVE,
        "model": opened.fingerprint,
        "settings": [[one.preset, one.budget, one.link] for one in settings],
        "length": request.length,
        "rounds": request.rounds,
        "device": str(opened.model.device),
        "machine": {"processor": here.processor, "cores": here.cores, "gpu": here.gpu},
        "threads": here.threads,
        "artefacts": artefacts,
        "tuned": request.tuned,
        "experts": request.experts,
        "base": request.base,
        "dense": request.dense,
        "devices": request.devices,
        "evaluated": tasks and tasks.digest,
    }
    if request.batch:
        conditions["batch"] = request.batch
    if request.activations:
        conditions["activations"] = request.activations
    if request.draft != NONE:
        conditions["draft"] = request.draft
    if request.kv_cache_dtype != AUTO:
        conditions["kv_cache_dtype"] = request.kv_cache_dtype
    digest = data_digest(text.sequences)
    return BenchJob(
        request.data, digest, text.num_tokens, request.seed, conditions, asked=text.asked
    )


def _grounds(request: BenchRequest, opened: MoeModel) -> Grounds:
    """Return the grounds of the times over all links; proportions of a machine are never mixed with
    others."""
    found = [grounds_of(link, device=str(opened.model.device)) for link in request.link_names]
    return Grounds(
        "; ".join(dict.fromkeys(one.says for one in found)), all(one.is_absolute for one in found)
    )


def _conditions(
    request: BenchRequest, text: BenchText, here: LocalMachine, taken_up: int, opened: MoeModel
) -> str:
    cores = f"{here.cores} cores of {here.processor}" + (f", {here.gpu}" if here.gpu else "")
    load = "" if here.load is None else f" (load {here.load:.1f} at the start)"
    experts = f", experts in {opened.expert_format}"
    dense = dense_suffix(request.dense)
    dtype = request.kv_cache_dtype
    cache = f", keys and values in {dtype}" * (dtype != AUTO)
    fused = ", a token's experts fused" if request.experts == FUSED else ""
    fused += f", activations of {request.activations} bits" * (request.activations is not None)
    spread = f", experts on {request.devices} devices" * (request.devices > 1)
    resumed = (
        f"; {taken_up} settings were measured by an earlier run of this command" if taken_up else ""
    )
    return (
        f"{len(text.sequences)} texts of {request.data}, {text.prefill} tokens of prompt and "
        f"{request.length - text.prefill} decoded each; losses of these {text.num_decoded:,} "
        f"tokens (+- standard error); {request.rounds} round{'s' * (request.rounds != 1)} in "
        f"random order from seed {request.seed}; medians over texts and rounds (quartiles); "
        f"{cores}{load}, {here.threads} "
        f"thread{'s' * (here.threads != 1)}{experts}{dense}{cache}{fused}{spread}{resumed}"
    )
