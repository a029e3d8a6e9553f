"""MoEpic, Figures 4(b) and 7, Table 3: the split ratio, the system beside its rivals, and ablations."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import MODELS
from artifacts.traces.synthetic import generate
from moectl.reproductions import moepic
from moectl.reproductions.report import UNKNOWN, Claim, Reproduction
from moectl.show.render import Sheet
from runtime.policies.base import Artefacts
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload

SHAPES = ("qwen1.5-moe-a2.7b", "mixtral-8x7b")
MACHINE = "a6000-pcie4"
LINKS = (25.0, 100.0, 400.0)  # GB/s; the first is the machine's own
BUDGETS = ("25%", "50%")
THETAS = (0.35, 0.5, 0.65, 0.8, 1.0)
RIVALS = ("pre-gated", "mixtral-offloading", "adapmoe", "moe-infinity")
LOSSY = ("pre-gated", "adapmoe")
LOWER = (37.5, 65.7)  # per cent, from the paper's abstract
PARTS: Mapping[str, tuple[str, dict[str, str]]] = {
    "as it is": ("moepic", {}),
    "lru in the place of lcp": ("moepic", {"eviction": "lru"}),
    "no prefetching": ("moepic", {"prefetch": "none"}),
    "all alike, uncut": ("moepic", {"residency": "split:theta=1.0"}),
    "all alike, cut in half": ("moepic", {"residency": "split:theta=0.5"}),
    "none of its parts": ("on-demand", {}),
}
# Hit rates as in the paper's Table 1; predictability as measured on the bundled model's routers.
DIALS = replace(moepic.DIALS, similarity=0.94, predictability=0.8, tokens=104, requests=2, prompt=12)
_NUM_LAYERS = 4
_NEAR = 0.99  # a smaller ratio is more than the noise of one trace

Milliseconds = dict[tuple, float]


def reproduce() -> Reproduction:
    """Predict the figures; no parameter is fitted to them."""
    workloads = {(shape, link): _workload(shape, link) for shape in SHAPES for link in LINKS}
    cut = {(*key, theta): ms for key, workload in workloads.items() for theta, ms in _exposed(workload).items()}
    with_splits = {shape: _with_splits(workloads[shape, LINKS[0]]) for shape in SHAPES}
    parts = {
        (shape, budget, part): _tpot(with_splits[shape], preset, budget, policies)
        for shape in SHAPES
        for budget in BUDGETS
        for part, (preset, policies) in PARTS.items()
    }
    rivals = {
        (shape, budget, rival): _tpot(with_splits[shape], rival, budget)
        for shape in SHAPES
        for budget in BUDGETS
        for rival in RIVALS
    }
    solved = {(shape, budget): _how(with_splits[shape], budget) for shape in SHAPES for budget in BUDGETS}
    return Reproduction(
        name="moepic",
        paper="MoEpic (Yan et al., 2025, arXiv:2509.08342), Figures 4(b) and 7, Table 3",
        sheets={"ratio": _ratio_sheet(cut), "rivals": _rival_sheet(parts, rivals, solved), "parts": _part_sheet(parts)},
        claims=_claims(cut, parts, rivals),
        assumed=_assumed(with_splits),
    )


def _workload(shape: str, link: float) -> Workload:
    model = MODELS[shape]
    model = replace(model, shape=replace(model.shape, num_layers=_NUM_LAYERS))
    return Workload(generate(DIALS, model.shape), model, replace(machine(MACHINE), link_gbps=link))


def _tpot(workload: Workload, preset: str, budget: str, policies: Mapping[str, str] | None = None) -> float:
    return workload.run(Setting(preset, preset, policies or {}, budget=budget)).times["tpot_ms"]


def _with_splits(workload: Workload) -> Workload:
    """The workload with solved splits, which moepic and its ablations follow."""
    solved = tuple(workload.solved(Setting("moepic", "moepic", budget=budget)) for budget in BUDGETS)
    return Workload(workload.trace, workload.model, workload.machine, artefacts=Artefacts(splits=solved))


def _exposed(workload: Workload) -> dict[float, float]:
    """Milliseconds a token beyond full residency, by split ratio, with a quarter of the bytes resident."""
    nothing = _tpot(workload, "full", BUDGETS[0])
    texts = {theta: {"residency": f"split:theta={theta}"} for theta in THETAS}
    return {theta: _tpot(workload, "moepic", BUDGETS[0], text) - nothing for theta, text in texts.items()}


def _how(workload: Workload, budget: str) -> str:
    split = workload.run(Setting("moepic", "moepic", budget=budget)).split
    ratios = sorted(map(float, str(split["theta"]).split()))
    return f"theta {ratios[0]:g} to {ratios[-1]:g}, {split['tops']} tops"


def _ratio_sheet(cut: Milliseconds) -> Sheet:
    rows = []
    for shape in SHAPES:
        for link in LINKS:
            exposed = [cut[shape, link, theta] for theta in THETAS]
            rows.append((shape, link, UNKNOWN, *exposed, _best(cut, shape, link)))
    columns = ("shape", "link GB/s", "paper", *(f"theta {theta:g}" for theta in THETAS), "least at")
    return Sheet(f"Exposed ms a token by the ratio at which all are cut, {BUDGETS[0]} resident", columns, rows)


def _best(cut: Milliseconds, shape: str, link: float) -> float:
    """The split ratio of least exposed time; 1 (whole experts) unless a cut is better by more than one per cent."""
    best = min(THETAS, key=lambda theta: cut[shape, link, theta])
    return best if cut[shape, link, best] < _NEAR * cut[shape, link, 1.0] else 1.0


def _rival_sheet(parts: Milliseconds, rivals: Milliseconds, solved: Mapping[tuple, str]) -> Sheet:
    rows = []
    for (shape, budget, rival), theirs in rivals.items():
        ours = parts[shape, budget, "as it is"]
        named = f"{rival} (lossy)" if rival in LOSSY else rival
        rows.append((shape, budget, named, theirs, ours, UNKNOWN, _lower(ours, theirs), solved[shape, budget]))
    columns = ("shape", "budget", "rival", "its tpot ms", "moepic's", "paper", "lower by %", "moepic's split")
    return Sheet(f"TPOT beside the rivals on {MACHINE}", columns, rows)


def _part_sheet(parts: Milliseconds) -> Sheet:
    rows = [
        (shape, budget, UNKNOWN, *(parts[shape, budget, part] for part in PARTS))
        for shape in SHAPES
        for budget in BUDGETS
    ]
    return Sheet("TPOT ms with a part of moepic left out", ("shape", "budget", "paper", *PARTS), rows)


def _lower(ours: float, theirs: float) -> float:
    return 100 * (1 - ours / theirs)


def _claims(cut: Milliseconds, parts: Milliseconds, rivals: Milliseconds) -> tuple[Claim, ...]:
    lower = {key: _lower(parts[*key[:2], "as it is"], theirs) for key, theirs in rivals.items()}
    exact = [value for key, value in lower.items() if key[2] not in LOSSY]
    interior = {(shape, link): _best(cut, shape, link) for shape in SHAPES for link in LINKS}
    return (
        *(_interior_claim(shape, {link: interior[shape, link] for link in LINKS}) for shape in SHAPES),
        Claim(
            "TPOT below every rival that alters nothing", "yes", _span(exact) + " % lower", all(v > 0 for v in exact)
        ),
        Claim("TPOT below every rival", "yes", _span(list(lower.values())) + " % lower", min(lower.values()) > 0),
        Claim(
            "lower by as much as in the paper",
            f"{LOWER[0]} to {LOWER[1]} %",
            f"{sum(LOWER[0] <= value for value in lower.values())} of {len(lower)}",
            min(lower.values()) >= LOWER[0],
        ),
        *(_part_claim(parts, part) for part in PARTS if part != "as it is"),
    )


def _interior_claim(shape: str, best: Mapping[float, float]) -> Claim:
    said = ", ".join(f"{theta:g} at {link:g} GB/s" for link, theta in best.items())
    return Claim(f"{shape}: a cut exposes less than whole experts", "yes", f"least at theta {said}", best[LINKS[0]] < 1)


def _part_claim(parts: Milliseconds, part: str) -> Claim:
    """The direction of an ablation."""
    slower = [parts[shape, budget, part] / parts[shape, budget, "as it is"] for shape in SHAPES for budget in BUDGETS]
    said = f"{min(slower):.2f} to {max(slower):.2f} times as long"
    return Claim(f"slower with {part}", "yes", said, all(value >= _NEAR for value in slower) and max(slower) > 1)


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def _assumed(with_splits: Mapping[str, Workload]) -> tuple[str, ...]:
    """Assumptions, and the reason why little transfer time can be hidden."""
    windows = []
    for shape, workload in with_splits.items():
        seconds = workload.latencies
        window = (seconds.attention_s + seconds.moe_s) / (seconds.load_s + seconds.latency_s)
        windows.append(f"{window:.2f} of an expert of {shape}")
    return (
        f"synthetic traces, {DIALS}: hit rates as in the paper's Table 1, predictions as good as the bundled model's",
        f"{_NUM_LAYERS} layers of each model with the whole head, which takes the same off every difference",
        f"while a layer computes the link brings {' and '.join(windows)}: {MACHINE} by data sheets, without the "
        "launches and host work that make a measured layer several times as long",
        "what cannot be brought in time is better held whole; a cut only makes more of it wanting: a cut pays where "
        "a layer holds no more experts than a token wants, and where the link is some ten times as fast",
        "with so short a window a prefetch that has begun makes the next load on demand wait, and drives out what a "
        "layer of few slots holds: with experts as large as Mixtral's loading on demand alone is faster",
        "moepic follows the split that replays fastest, solved on the trace that is replayed; rivals are moectl's "
        "presets in the same memory, where the paper's run their own code",
        "pre-gated and adapmoe alter the output here: an untrained gate, and ranks left out when absent",
        "of the paper only the range of its abstract is available here, no figure of 4(b), 7 or Table 3",
    )
