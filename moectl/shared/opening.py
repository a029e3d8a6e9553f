"""Models and sessions as commands open them: without the messages of the libraries below, and in
the memory that is free."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from transformers.utils import logging

from artifacts.errors import BadInput
from artifacts.modelshapes.attention import attention_of
from artifacts.modelshapes.kv_cache import AUTO, kept_share
from artifacts.store.runs import ModelInfo
from moectl.bundled import demo_model
from moectl.shared.defaults import FREE
from moectl.shared.preset_choice import AUTO as AUTO_PRESET
from moectl.shared.preset_choice import with_choice
from moectl.shared.terminal.obtaining import obtain
from runtime.backends.choose import choose_backend, dequantised
from runtime.control import sizes
from runtime.devices import free_nbytes, resolve_device, spread_over
from runtime.model.kv_cache import coding_of
from runtime.model.open import MoeModel, open_model
from runtime.policies.presets import preset
from runtime.session import settings as ways
from runtime.session.session import Session
from runtime.session.settings import Settings
from runtime.tiers.slots import NoRoom

CONTEXT = 4096  # tokens, as of `moectl plan`
RESERVE_NBYTES = 1 << 30  # at least, or a tenth: for activations, buffers, and the driver


def quieten() -> None:
    """Silence transformers: its advice does not apply to moectl's users."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def open_quietly(name: str, *, device: str = "auto", dense: int | None = None) -> MoeModel:
    """Open a checkpoint, by any name that `obtain` takes, on a device as the user names it; `dense`
    is as for `open_model`."""
    obtain(name)
    quieten()
    return open_model(name, device=resolve_device(device), dense=dense)


def model_info(name: str, opened: MoeModel) -> ModelInfo:
    """Describe an opened model for the store."""
    return ModelInfo(name, opened.fingerprint, opened.family, opened.stored_shape)


def existing(store: Path) -> Path | None:
    """Return the path of the store, None when there is no such file: most runs need no store."""
    return store if store.exists() else None


@dataclass(frozen=True, slots=True)
class Settled:
    """Settings without anything left to choose, why this preset was chosen, empty where the user
    named it, and a line on each choice. `is_budget_free`: the budget is what memory was free."""

    settings: Settings
    why: str = ""
    told: tuple[str, ...] = ()
    is_budget_free: bool = False

    def tell(self) -> None:
        """Print the lines on stderr."""
        for line in self.told:
            print(line, file=sys.stderr)


def settled(
    opened: MoeModel,
    settings: Settings,
    store: Path | None,
    *,
    num_cached: int | None = None,
    together: int = 1,
) -> Settled:
    """Return the settings with a choice in the place of each `auto`. Room is left for the keys and
    values of `num_cached` tokens; `together` such runs share the memory."""
    told = []
    if settings.experts == ways.AUTO:
        settings, line = _with_kernels(opened, settings)
        told.append(line)
    if settings.activations:
        told.append("Activations 8: lossy, as llama.cpp rounds tokens; moectl bench has its price")
    is_free = settings.budget == FREE
    if is_free and (own := preset(settings.preset).budget):
        settings = replace(settings, budget=own)
    elif is_free:
        budget, line = free_budget(
            opened,
            num_cached,
            num_devices=settings.devices,
            together=together,
            kv_cache_dtype=settings.kv_cache_dtype,
        )
        settings = replace(settings, budget=budget)
        told.append(line)
    settings, why = with_choice(opened, settings, store)
    if why:
        told.append(f"Preset {preset(settings.preset).name}: {why}")
    return Settled(settings, why, tuple(told), is_free)


def _with_kernels(opened: MoeModel, settings: Settings) -> tuple[Settings, str]:
    """Return the settings with compiled kernels where there are any for this model's experts, and a
    line that says so."""
    kind = choose_backend(opened, num_devices=settings.devices)
    if kind is None:
        line = f"Experts exact: there are no kernels for those of {opened.family}"
        return replace(settings, experts=ways.EXACT), line
    line = "Experts fused: equal within rounding; --experts exact gives the model's own bits"
    if left := dequantised(kind, opened):
        line = f"{line}; {left}"
    return replace(settings, experts=ways.FUSED), line


def free_budget(
    opened: MoeModel,
    num_cached: int | None = None,
    *,
    num_devices: int = 1,
    together: int = 1,
    kv_cache_dtype: str = AUTO,
) -> tuple[str, str]:
    """Return as a budget what the fast tier's memory has free, less the keys and values of
    `num_cached` tokens and a reserve, and at least a token's experts, and a line that says so.
    `together` runs share the memory; experts may lie on several devices."""
    shape = opened.shape
    num_cached = num_cached or CONTEXT
    places = set(spread_over(opened.model.device, num_devices))
    free = free_nbytes(opened.model.device) // together
    cache = num_cached * cached_nbytes(opened, kv_cache_dtype)
    reserve = max(RESERVE_NBYTES, free // 10)
    least = shape.num_layers * shape.top_k * shape.expert_nbytes
    room = min(shape.nbytes, max(least, (free - cache - reserve) * len(places)))
    shown = [f"{nbytes / 2**30:.1f}" for nbytes in (free, cache, reserve)]
    line = (
        f"Budget {100 * room / shape.nbytes:.0f}% of experts ({shown[0]} GiB free, less {shown[1]} "
        f"for {num_cached:,} tokens and {shown[2]} in reserve)"
    )
    return "100%" if room == shape.nbytes else f"{room}B", line


def cached_nbytes(opened: MoeModel, kv_cache_dtype: str = AUTO) -> int:
    """Return the bytes of one token's keys and values of this type, by the model's config. Raises
    BadUsage where the model cannot keep them so."""
    config = opened.config.get_text_config()
    num_layers = getattr(config, "num_hidden_layers", opened.shape.num_layers)
    nbytes = num_layers * _cache_width(opened, config.to_dict()) * opened.dtype.itemsize
    coding = coding_of(opened.model, kv_cache_dtype)
    if coding is None:
        return nbytes
    part = len(coding.layers) / (len(coding.layers) + coding.num_others)
    return round(nbytes * (1 - part * (1 - kept_share(coding.bits, opened.dtype.itemsize))))


def _cache_width(opened: MoeModel, config: dict[str, object]) -> int:
    """Return the numbers of a layer's keys and values for a token: where the config does not say,
    as many as without grouped queries."""
    try:
        attention = attention_of(config, Path(opened.family))
    except BadInput:
        return 2 * opened.layers[0].hidden_size
    if latent := attention.latent:  # transformers keeps what it makes of the compressed ones
        return attention.heads * (latent.nope + latent.rope + latent.value)
    return attention.cache_width


def load(
    model: str | Path | None = None,
    *,
    budget: str | float = FREE,
    preset: str = AUTO_PRESET.name,
    store: str | Path | None = None,
) -> Session:
    """Open a model as `moectl run` does: a folder, a GGUF file, a hub id or a name; by default the
    bundled one.

    `budget`: fast memory for experts, as a size (`8GB`) or a share of them all (`.25`, `25%`), by
    default what is free. `preset`: by default the fastest that loses nothing; another may need
    artefacts of `store`. For other options open a `Session` with `Settings`. Raises a Problem,
    whose text says what to do.
    """
    name = str(model or demo_model())
    share = sizes.budget_text(budget)
    if share != FREE:
        sizes.check_budget(share)
    settings = Settings(
        AUTO_PRESET if preset == AUTO_PRESET.name else preset, budget=share, experts=ways.AUTO
    )
    path = None if store is None else Path(store)
    opened = open_quietly(name)
    return open_session(opened, settled(opened, settings, path), store=path, name=name)


def open_session(opened: MoeModel, chosen: Settled, **own: object) -> Session:
    """Open a session over the model as `Session.over` does. A budget that was taken for free and
    does not fit is halved, which is told in a line, as long as a token's experts fit it."""
    settings = chosen.settings
    shape = opened.shape
    while True:
        try:
            return Session.over(opened, settings, **own)
        except NoRoom as full:
            num_experts = sizes.budget_nbytes(settings.budget, shape) // shape.expert_nbytes // 2
            if not chosen.is_budget_free or num_experts < shape.num_layers * shape.top_k:
                raise
            print(f"Budget halved to {num_experts} experts: {full}", file=sys.stderr)
            chosen_preset = preset(settings.preset)
            if chosen_preset.budget:  # `full` has one of its own
                chosen_preset = preset("on-demand")
            settings = replace(settings, budget=f"{num_experts}x", preset=chosen_preset)
