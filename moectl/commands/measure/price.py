"""`moectl price`: what every shortcut loses on the user's text, for the bytes that it saves."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage, Problem
from moectl.bundled import BUNDLED, demo_model
from moectl.cli.options import (
    DEFAULT_THREADS,
    Budget,
    Data,
    Device,
    HalvedLength,
    Json,
    Model,
    Preset,
    Seed,
    StorePath,
    Threads,
)
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing
from moectl.shared.names import names_in

if TYPE_CHECKING:
    from moectl.charts.scales import Drawing
    from moectl.charts.scatter import Mark
    from moectl.shared.terminal.progress import Advance
    from moectl.show.render import Sheet
    from profilers.compare.bench import BenchText
    from profilers.compare.prices import Price, Pricing, Shortcut
    from runtime.model.open import MoeModel
    from runtime.policies.base import Artefacts

ALL = "all"


@dataclass(frozen=True, slots=True)
class PriceOptions:
    """The text to price on, the shortcuts, and the cache that they run in."""

    data: Data = "builtin:held-out"
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of it that each shortcut reads.")] = 512
    length: HalvedLength = 64
    calibrate: Annotated[
        str, typer.Option(help="Other text, which chooses what is pruned and skipped.")
    ] = "builtin"
    shortcuts: Annotated[
        str, typer.Option(help="Families of shortcuts, as drop,pruned,bits, or all.")
    ] = ALL
    mixtures: Annotated[int, typer.Option(min=0, help="Mixtures of two, the cheapest first.")] = 6
    budget: Budget = "25%"
    picture: Annotated[Path | None, typer.Option(help="Draw them too, as .svg.")] = None
    device: Device = "auto"
    threads: Threads = DEFAULT_THREADS
    seed: Seed = 0


@dataclass(frozen=True, slots=True)
class Priced:
    """The prices, in the order of the catalogue; which are on the front, by name; mixtures that are
    not, and shortcuts that could not run, with the reason. `receipt` is what others can cite."""

    prices: "list[Price]"
    front: tuple[str, ...]
    num_beaten: int
    refused: dict[str, str]
    receipt: dict[str, object]


def price(
    *,
    model: Model = None,
    preset: Preset = "on-demand",
    options: PriceOptions,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Price every shortcut: what it loses, for what it saves.

    Live at one budget, on your text, paired by token with the full model.
    """
    with importing():
        from moectl.charts.pictures import check_picture, write_picture
        from moectl.show.render import show_json, show_sheet

    if options.picture:
        check_picture(options.picture)
    priced = measure(model or str(demo_model()), preset, options, store=store)
    if options.picture:
        write_picture(drawing(priced), options.picture)
    if json:
        show_json(records(priced))
        return
    show_sheet(sheet(priced))
    for name, why in priced.refused.items():
        print(f"not priced: {name}: {why}")


def measure(name: str, preset: str, options: PriceOptions, *, store: Path) -> Priced:
    """Price the shortcuts, then mixtures of them; of these keep the ones on the front. Raises
    BadUsage for an unknown shortcut, and as `Pricing` does."""
    import torch

    from moectl.shared.opening import open_quietly
    from moectl.shared.stores import stored_artefacts
    from moectl.shared.terminal.progress import progress_bar
    from moectl.shared.text import read_text
    from profilers.compare import prices
    from profilers.routing.saliency import saliency

    torch.set_num_threads(options.threads)
    opened = open_quietly(name, device=options.device)
    artefacts = stored_artefacts(store, opened)
    cut = {"length": options.length, "num_tokens": options.tokens, "seed": options.seed}
    text = read_text(opened, options.data, **cut)
    calibration = read_text(opened, options.calibrate, **cut)
    scores = saliency(opened, calibration.sequences)
    asked = _asked(options, prices.shortcuts(opened.shape, scores, seed=options.seed))
    receipt = _receipt(name, preset, options, opened, (text, calibration), artefacts)
    with progress_bar("pricing", unit="shortcuts") as advance:
        pricing = prices.Pricing(opened, artefacts, text, name=preset, budget=options.budget)
        return _priced(pricing, asked, options.mixtures, advance, receipt)


def _priced(
    pricing: "Pricing",
    asked: "list[Shortcut]",
    num_mixtures: int,
    advance: "Advance",
    receipt: dict[str, object],
) -> Priced:
    from profilers.compare import prices

    refused: dict[str, str] = {}
    total = 1 + len(asked) + num_mixtures

    def run(shortcuts: "list[Shortcut]", done: int) -> "Iterator[Price]":
        for number, shortcut in enumerate(shortcuts, done):
            advance(number, total)
            try:
                yield pricing.price(shortcut)
            except Problem as problem:
                refused[shortcut.name] = str(problem)

    alone = list(run([prices.EXACT, *asked], 0))
    mixed = list(run(prices.mixtures(alone, num_mixtures), 1 + len(asked)))
    best = prices.front(alone + mixed)
    kept = [one for one in mixed if one in best]
    front = tuple(one.shortcut.name for one in best)
    return Priced(alone + kept, front, len(mixed) - len(kept), refused, receipt)


def _asked(options: PriceOptions, known: "list[Shortcut]") -> "list[Shortcut]":
    families = dict.fromkeys(one.family for one in known)
    wanted = list(families) if options.shortcuts == ALL else names_in(options.shortcuts)
    for name in wanted:
        if name not in families:
            raise BadUsage(unknown("shortcut", name, families))
    return [one for one in known if one.family in wanted]


def _receipt(
    name: str,
    preset: str,
    options: PriceOptions,
    opened: "MoeModel",
    texts: "tuple[BenchText, BenchText]",
    artefacts: "Artefacts",
) -> dict[str, object]:
    """Return what a reader needs to get the same digits, and to cite them."""
    from artifacts.store.runs import versions
    from profilers.hardware.this_machine import LocalMachine
    from profilers.text.corpus import data_digest

    text, calibration = texts
    here = LocalMachine.look(opened.model.device)
    return {
        "command": _command(name, preset, options),
        "model": _shown(name),
        "fingerprint": opened.fingerprint,
        "text": options.data,
        "text_sha256": data_digest(text.sequences),
        "calibration_sha256": data_digest(calibration.sequences),
        "num_texts": len(text.sequences),
        "num_scored": text.num_decoded,
        "shortfall": text.shortfall,
        "budget": options.budget,
        "preset": preset,
        "seed": options.seed,
        "artefacts": {kind: asdict(origin) for kind, origin in artefacts.origins.items()},
        "processor": f"{here.cores} cores of {here.processor}",
        "device": str(opened.model.device),
        "threads": options.threads,
        "versions": versions(),
    }


def _shown(name: str) -> str:
    return BUNDLED if name == str(demo_model()) else Path(name).name


def _command(name: str, preset: str, options: PriceOptions) -> str:
    return (
        f"moectl price {_shown(name)} --data {options.data} --calibrate {options.calibrate} "
        f"--tokens {options.tokens} --length {options.length} --budget {options.budget} "
        f"--preset {preset} --shortcuts {options.shortcuts} --mixtures {options.mixtures} "
        f"--seed {options.seed} --threads {options.threads}"
    )


def records(priced: Priced) -> dict[str, object]:
    """Return the prices as JSON values."""
    rows = [asdict(one) | {"is_best": one.shortcut.name in priced.front} for one in priced.prices]
    return {
        "rows": rows,
        "num_beaten": priced.num_beaten,
        "refused": priced.refused,
        "receipt": priced.receipt,
    }


def sheet(priced: Priced) -> "Sheet":
    """Return the table, by rising saving."""
    from moectl.show.render import Sheet

    rows = [
        (*_row(one), "best" * (one.shortcut.name in priced.front))
        for one in sorted(priced.prices, key=lambda one: one.saved_nbytes)
    ]
    columns = ("shortcut", "nats lost a token", "KL", "saved a token", "of all")
    return Sheet("Prices of shortcuts", (*columns, "price", ""), rows, _note(priced))


def _row(one: "Price") -> tuple:
    from moectl.show.render import NumBytes

    return (
        one.shortcut.name,
        f"{one.loss:.4f} ± {one.loss_error:.4f}",
        f"{one.kl:.4f}",
        NumBytes(one.saved_nbytes) if one.saved_nbytes >= 0 else "more",
        f"{one.saved_share:.1%}",
        "-" if one.price is None else f"{one.price:.4f} ± {one.price_error:.4f}",
    )


def _note(priced: Priced) -> str:
    exact = priced.prices[0]
    receipt = priced.receipt
    return (
        f"live, {receipt['num_scored']:,} decoded tokens of {receipt['num_texts']} texts of "
        f"{receipt['text']}{receipt['shortfall'] and '; only ' + str(receipt['shortfall'])}, "
        f"± standard error over texts, paired by token with the full model; {receipt['budget']} "
        f"of the experts held, {receipt['preset']} moves {exact.nbytes / 2**20:.3g} MiB a decoded "
        f"token; price: nats for each tenth of these bytes; best: no other is as near (KL) and "
        f"saves as much; {priced.num_beaten} mixtures are beaten and not shown; seed "
        f"{receipt['seed']}, text {str(receipt['text_sha256'])[:12]}, model "
        f"{str(receipt['fingerprint'])[:12]}, {receipt['processor']}"
    )


def drawing(priced: Priced) -> "Drawing":
    """Draw loss against the share of bytes saved, every shortcut named."""
    from moectl.charts.plots import WIDTH
    from moectl.charts.scales import Frame, linear_scale
    from moectl.charts.scatter import loss_scale, scatter

    frame = Frame(width=WIDTH, height=460, left=62, right=20, top=28)
    marks = [_mark(one, is_best=one.shortcut.name in priced.front) for one in priced.prices]
    x = linear_scale(105, name="% of the bytes over the link saved", **frame.across)
    y = loss_scale([mark.y for mark in marks], name="perplexity lost", **frame.upwards)
    receipt = priced.receipt
    title = f"Prices of shortcuts, {receipt['budget']} of the experts held"
    says = f"{title}: {_told(marks)}"
    key = {"exact": "nothing is as near (KL) and saves as much", "altered": "beaten"}
    note = f"{receipt['num_scored']:,} tokens of {receipt['text']}; lower right is better"
    return scatter(title, marks, x, y, frame, says=says, note=note, key=key)


def _told(marks: "list[Mark]") -> str:
    return "; ".join(f"{mark.name} {mark.x:.0f} %, {100 * mark.y:.1f} %" for mark in marks)


def _mark(one: "Price", *, is_best: bool) -> "Mark":
    from math import expm1

    from moectl.charts.scatter import Mark

    saved_percent = 100 * max(0.0, one.saved_share)
    lost = max(0.0, expm1(one.loss))
    return Mark(saved_percent, lost, one.shortcut.name, "exact" if is_best else "altered")
