"""`moectl tune`: the fastest policies for a model, a budget and a machine, lossless and within a loss; found by
simulation, verified live, kept as presets."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from time import perf_counter

import torch

from artifacts.errors import BadUsage
from artifacts.modelshapes.known import MODELS
from artifacts.shape import FULL_BITS
from artifacts.store import presets as storedpresets
from artifacts.store.runs import RunInfo, utc_now
from artifacts.store.store import add_run
from moectl.bench.table import loss_of_base
from moectl.bundled import demo_model
from moectl.shared.opening import check_store, model_info, open_quietly
from moectl.shared.progress import progress_bar
from moectl.shared.trace_source import on_base as traced_on_base
from moectl.tune.distribute import spread
from moectl.tune.prepare import known_of, parts_of, plan_for, scale_of, search_on, text_for, trace_for
from moectl.tune.request import TuneRequest
from moectl.tune.result import Pick, Tuned
from moectl.tune.verify import checks_of, verified
from profilers.compare.verify_search import Verifier
from profilers.hardware.live_costs import pace_of
from profilers.text.corpus import documents
from profilers.workers.choose import executing
from runtime.model.locate import locate
from runtime.model.open import MoeModel
from runtime.session.on_base import on_base

COMMAND = "tune"


def tune(name: str | None, request: TuneRequest, *, store: Path, device: str, threads: int) -> Tuned:
    """Search, verify, keep. Raises BadUsage, BadInput, Incompatible."""
    torch.set_num_threads(threads)
    started_at, begin_s = utc_now(), perf_counter()
    check_store(store)
    name = name or str(demo_model())
    if name in MODELS and not Path(name).exists():
        raise BadUsage(f"{name} is a shape without weights, and nothing of it can be verified: give a checkpoint")
    for data in filter(None, (request.data, request.held_out, request.check_data)):
        documents(data)  # what leads nowhere is told before anything is measured
    opened = open_quietly(name, device=device)
    text = text_for(opened, request.held_out, request, num_tokens=request.tokens)
    known, similarity, profile = known_of(store, opened)
    based, known = on_base(opened, known, request.base)
    pace = pace_of(
        based,
        locate(name),
        scaled_to=request.scaled_to,
        link=request.link,
        experts=request.experts,
        artefacts=known,
        profile=profile,
    )
    traced = trace_for(name, opened, request, store)
    trace, other, other_name = parts_of(name, opened, traced, request)
    traced = traced_on_base(traced, request.base)
    search = search_on(traced, trace, pace, similarity, request)
    verifier = Verifier(based, known, text, pace, budget=request.budget)
    search.scale = scale_of(search, verifier)
    with executing(request.executor, request.workers) as executor:
        plan, planned = plan_for(search, request, num_workers=executor.count)
        with progress_bar("searching", unit="replays") as advance, spread(search, executor) as replay_all:
            found = search.run(plan, progress=advance, replay_all=replay_all)
    searched_s = perf_counter() - begin_s
    picks, live, why = verified(found, verifier, request)
    checks = checks_of(picks, found, search_on(traced, other, pace, similarity, request), search, request, other_name)
    receipt = {
        "model": name,
        "trace": traced.name,
        "passes": f"{plan.rungs[-1]} of {search.num_passes}, in rounds of {', '.join(map(str, plan.rungs))}",
        "candidates": f"{found.num_tried} of {found.num_space} combinations, {found.num_replays} replays ({planned})",
        "left out": f"{sum(found.refused.values())}" + "".join(f"; {n}: {why}" for why, n in found.refused.items()),
        "base": _against(verifier, opened, request.base),
        "costs": f"{request.machine_name}, {pace.source}",
        "scale": asdict(search.scale),
        "emulated": dict(pace.settings),
        "seed": request.seed,
        "seconds": f"{searched_s:.0f} until the search was over, {perf_counter() - begin_s:.0f} in all",
        "assumed": search.assumed,
    }
    run = _keep(picks, request, store, name, opened, started_at, perf_counter() - begin_s, receipt)
    last = plan.rungs[-1]
    return Tuned(
        request,
        based.shape,
        picks,
        found,
        live,
        verifier.measured(),
        search.oracle(last),
        search.full(last),
        checks,
        receipt,
        run,
        why,
    )


def _against(verifier: Verifier, checkpoint: MoeModel, bits: int) -> str:
    """For the receipt: what losses are measured against."""
    return "the checkpoint" if bits == FULL_BITS else loss_of_base(verifier.loss_of_base(checkpoint), bits)


def _keep(
    picks: list[Pick],
    request: TuneRequest,
    path: Path,
    name: str,
    opened: MoeModel,
    started_at: datetime,
    seconds: float,
    receipt: Mapping[str, object],
) -> int:
    rows = [
        storedpresets.StoredPreset(
            pick.name,
            **pick.tried.combination._asdict(),
            budget=request.budget,
            machine=request.machine_name,
            max_loss=0.0 if pick.tried.is_lossless else request.max_loss,
            tpot_ms=pick.live.measured.tpot_ms.median if pick.live else None,
            perplexity_ratio=1 + pick.quality.loss if pick.quality else None,
        )
        for pick in picks
    ]
    model = model_info(name, opened)
    info = RunInfo(
        command=COMMAND,
        model_id=model.model_id,
        started_at=started_at,
        seconds=seconds,
        data=request.data,
        tokens=request.tokens,
        seed=request.seed,
        parameters={"asked": asdict(request), "receipt": dict(receipt)},
    )
    return add_run(path, info, {storedpresets.TABLE: storedpresets.to_rows(rows)}, model=model)
