"""The statements of the context-aware GPU-NDP paper beside what its own parameters give, each with
its verdict."""

from collections.abc import Iterator, Mapping, Sequence

from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import Machine
from artifacts.modelshapes.known import MODELS
from artifacts.modelshapes.memory import backbone_memory, backbone_of
from artifacts.shape import FULL_BITS
from moectl.show.render import Sheet
from tools.reproductions.contextaware import figures as paper
from tools.reproductions.contextaware.systems import (
    HOBBIT,
    LENGTHS,
    NOTHING,
    STATIC,
    SWAPS,
    Measured,
    Timed,
    gpu_gb,
)
from tools.reproductions.judged import (
    by_request,
    by_seed,
    derived,
    fitted,
    left_out,
    near,
    number,
    ruled_out,
)
from tools.reproductions.recorded import Recorded
from tools.reproductions.report import NOT_DETERMINED, NOT_TESTABLE, Claim

NEAR = 0.1  # a figure agrees that is at most so far from the printed one
_EXACT = 0.005
_COSINE = 0.02  # below the .04 by which another request's is less
FIRST = 32  # tokens of a recorded request that stand for its prompt


def claims(
    each: Sequence[Mapping[str, Measured]], device: Machine, recorded: Sequence[Recorded]
) -> tuple[Claim, ...]:
    """Every numeric statement of the paper's text, in its order by section; `each` by seed."""
    measured = each[0]
    return (
        *_of_models(),
        *_of_loading(device),
        *_of_memory(device),
        *(claim for one in recorded for claim in _of_likeness(one)),
        *_of_throughput(measured),
        *_of_requests(measured),
        *_of_causes(each),
        *_of_accuracy(),
        *_of_weights(),
    )


def _of_models() -> Iterator[Claim]:
    for name in paper.MODELS_MEASURED:
        model = MODELS[name]
        experts = model.shape.nbytes / model.weight_nbytes / 1e9
        whole = (
            experts
            + backbone_memory(model, backbone_of(name)).weights_nbytes / model.dtype_nbytes / 1e9
        )
        for what, printed, ours in zip(
            ("experts", "all"), paper.PARAMETERS[name], (experts, whole), strict=True
        ):
            claim = f"{name}: billions of parameters, {what} (Table 1)"
            yield derived(claim, f"{printed:g}", f"{ours:.1f}", _is_near(ours, printed, _EXACT))


def _of_loading(device: Machine) -> Iterator[Claim]:
    printed = paper.LARGE_GB.low
    ours = gpu_gb(paper.LARGE, MODELS[paper.LARGE].shape.num_experts)
    yield derived(
        f"{paper.LARGE} in FP16, GB (1)",
        f"about {printed:g}",
        f"{ours:.0f}",
        _is_near(ours, printed, NEAR),
    )
    share = loading_share(device)
    yield derived(
        "bringing an expert can exceed this share of a block's time (1)",
        f"{paper.LOADING_SHARE.low:g}",
        f"{share:.3f}",
        share > paper.LOADING_SHARE.low,
    )


def _of_memory(device: Machine) -> Iterator[Claim]:
    for name, hot in paper.HOT.items():
        gb = gpu_gb(name, hot)
        ours = f"{gb:.1f} GB of {device.fast_gb:g}"
        yield derived(
            f"{name}: so many hot experts a layer fit (5.1)", str(hot), ours, gb <= device.fast_gb
        )


def _of_likeness(recorded: Recorded) -> Iterator[Claim]:
    """Figure 4, on recorded decoding: a request's first tokens stand for its prompt. The printed
    cosine is of Mixtral-8x7B."""
    own, other = recorded.likeness(FIRST)
    where = paper.COSINE.where
    if recorded.shape.num_experts == MODELS[paper.SMALL].shape.num_experts:
        yield by_request(
            f"{recorded.name}: cosine of the uses of a request's beginning and its rest ({where})",
            f"{paper.COSINE}",
            own,
            off="another request's rest",
            null=other,
            test=lambda cosine: abs(cosine - paper.COSINE.low) <= _COSINE,
            form=number(".3f"),
            is_gain=False,
        )
    yield by_request(
        f"{recorded.name}: a request's beginning tells its own rest ({where})",
        "closer than another request's",
        own - other,
        off="the rest of another request",
        null=0.0,
        form=number("+.3f"),
    )


def likeness_sheet(every: Sequence[Recorded]) -> Sheet:
    rows = [
        (one.name, first, *(float(cosine[0]) for cosine in one.likeness(first)))
        for one in every
        for first in (FIRST, 2 * FIRST)
    ]
    columns = ("routing", "first tokens", "cosine with its rest", "with another request's")
    return Sheet("Figure 4, on recorded decoding", columns, rows)


def loading_share(device: Machine) -> float:
    """The share of bringing one expert in the time of a layer of one token that misses it,
    Mixtral-8x7B."""
    model = MODELS[paper.SMALL]
    costs = Costs.of(model, device)
    computed = costs.rest.seconds(1) + model.shape.top_k * costs.expert.seconds(1)
    return costs.load_s / (costs.load_s + computed)


def _of_throughput(measured: Mapping[str, Measured]) -> Iterator[Claim]:
    for name, one in measured.items():
        for bits in paper.BITS:
            printed = paper.NDP_SIDE[name, bits].low
            ours = one.near(bits, one.rivals[STATIC])
            claim = f"{name}: NDP side, {bits} bits, over {STATIC} (5.2)"
            yield derived(claim, f"about {printed:g}", f"{ours:.2f}", _is_near(ours, printed, NEAR))
        low, high = (one.decoding(3, one.rivals[rival]) for rival in (STATIC, NOTHING))
        yield left_out(
            f"{name}: decoding, 3 bits (5.2, Figure 6)",
            str(paper.DECODING[name, 3]),
            f"Table 2 and the placement give {low:.1f} over {STATIC}, {high:.1f} over {NOTHING}; "
            f"more takes one that swaps {one.rate:.3f} experts a layer and token, a rate that is "
            "not printed",
            NOT_DETERMINED,
        )
        printed = paper.DECODING[name, 2].low
        ours = one.decoding(2, one.rivals[SWAPS])
        said = f"{ours:.1f}, predicted at the rate fitted to 3 bits"
        yield fitted(
            f"{name}: decoding, 2 bits (5.2, Figure 6)",
            f"{printed:g}",
            said,
            _is_near(ours, printed, NEAR),
        )
    yield ruled_out(
        f"decoding over the state of the art, up to ({paper.ABSTRACT.where})",
        str(paper.ABSTRACT),
        f"section 5.2 itself prints up to {max(one.high for one in paper.DECODING.values()):g}; "
        f"{paper.ABSTRACT} is {paper.SMALL} at 3 bits",
    )


def _of_requests(measured: Mapping[str, Measured]) -> Iterator[Claim]:
    for name, one in measured.items():
        for bits in paper.BITS:
            printed = paper.END_TO_END[name, bits]
            rival = one.rivals[SWAPS]
            said = (
                f"{_by_length(one, bits, rival, printed.low)}, at the fitted rate. Lengths and "
                "rate are not printed"
            )
            claim = f"{name}: end to end, {bits} bits (5.2, Figure 5)"
            yield left_out(claim, str(printed), said, NOT_DETERMINED)
        printed = paper.OVER_HOBBIT[name].low
        said = _by_length(one, 2, one.rivals[HOBBIT], printed)
        claim = f"{name}: end to end over {HOBBIT}, 2 bits, up to (5.2)"
        said += f". Lengths, and {HOBBIT}'s precisions and cache, are not printed"
        yield left_out(claim, f"{printed:g}", said, NOT_DETERMINED)


def _by_length(one: Measured, bits: int, rival: Timed, printed: float) -> str:
    """Return a text of the speed-up at the fewest and the most decoded tokens, and from how many
    tokens on it reaches the printed one."""
    first, last = (one.end_to_end(bits, rival, count) for count in (LENGTHS[0], LENGTHS[-1]))
    least = tokens_for(one, bits, printed, rival)
    reached = "never" if least is None else f"from {least} decoded tokens"
    return (
        f"{first:.1f} at {LENGTHS[0]} decoded tokens, {last:.1f} at {LENGTHS[-1]}; {printed:g} "
        f"{reached}"
    )


def tokens_for(one: Measured, bits: int, speedup: float, rival: Timed) -> int | None:
    """Return the fewest decoded tokens at which a request is `speedup` times as fast as by the
    rival; None where no request is."""
    ours = one.ours[bits]
    gained = rival.token_s - speedup * ours.token_s
    if gained <= 0:
        return None
    behind = speedup * ours.request_s(0) - rival.request_s(0)
    return max(0, -int(-behind // gained))


def _of_causes(each: Sequence[Mapping[str, Measured]]) -> Iterator[Claim]:
    for name in paper.MODELS_MEASURED:
        printed = paper.DECODING[name, 2].low / paper.DECODING[name, 3].low
        times = [one[name].ours[3].token_s / one[name].ours[2].token_s for one in each]
        yield by_seed(
            f"{name}: 2 bits over 3, decoding (5.2)",
            f"{printed:.2f}",
            times,
            off="3 bits in both",
            null=[1.0] * len(times),
            test=near(printed, NEAR),
            form=number(".2f"),
        )
    measured = each[0]
    for name, one in measured.items():
        ours = one.ours[3].token_s
        static = one.rivals[STATIC].token_s
        swaps = one.rivals[SWAPS].token_s
        few, full = (one.swapping[bits].token_s for bits in (3, FULL_BITS))
        migration = [(swaps - static) / ours, (few - ours) / ours]
        bits = [(static - ours) / ours, (full - few) / ours]
        said = (
            f"at the fitted rate no swaps save {migration[0]:.1f} times our token's time, 3 bits "
            f"then {bits[0]:.1f}; the other way round 3 bits {bits[1]:.1f}, no swaps then "
            f"{migration[1]:.1f}"
        )
        claim = f"{name}: gains more by less migration than by few bits (5.2)"
        holds = all(one > other for one, other in zip(migration, bits, strict=True))
        yield fitted(claim, "yes", said, holds)


def _of_accuracy() -> Iterator[Claim]:
    averages = {name: average for name, (_, average) in paper.TABLE_3.items()}
    errors = [abs(_mean(tasks) - average) for tasks, average in paper.TABLE_3.values()]
    said = f"at most {max(errors):.3f} from the mean of eight"
    yield derived("averages of Table 3", "5 rows", said, max(errors) < 0.0051)
    for bits, printed in paper.DROP.items():
        ours = averages["original"] - averages[f"{bits} bits"]
        claim = f"average drop at {bits} bits, points ({printed.where}), from Table 3"
        yield derived(claim, str(printed), f"{ours:.2f}", abs(ours - printed.low) <= 0.051)
    for bits, printed in ((3, "slight"), (2, str(paper.SELECTOR_GAIN))):
        ours = averages[f"{bits} bits"] - averages[f"{bits} bits, no selector"]
        is_said = 0 < ours < 0.5 if bits == 3 else abs(ours - paper.SELECTOR_GAIN.low) < 0.051
        yield derived(
            f"the selector gains at {bits} bits, points (5.3), from Table 3",
            printed,
            f"{ours:.2f}",
            is_said,
        )


def _of_weights() -> Iterator[Claim]:
    averages = {name: average for name, (_, average) in paper.TABLE_3.items()}
    for bits in paper.BITS:
        yield left_out(
            f"{paper.SMALL}: accuracy at {bits} bits, mean of eight tasks (Table 3)",
            str(averages[f"{bits} bits"]),
            "needs its weights: moectl quantize FOLDER --recipe plain, then the tasks of "
            "lm-evaluation-harness through profilers.compare.lm_eval_model on context-aware with "
            f"{bits} bits",
            NOT_TESTABLE,
        )


def _mean(figures: Sequence[float]) -> float:
    return sum(figures) / len(figures)


def _is_near(ours: float, printed: float, tolerance: float) -> bool:
    return abs(ours / printed - 1) <= tolerance
