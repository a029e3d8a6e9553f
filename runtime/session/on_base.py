"""A base of few bits: in every tier and every count an expert is its stored replica, not what the checkpoint has."""

from dataclasses import replace

from artifacts.errors import Incompatible
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.tiers.replicas import open_replicas


def on_base(opened: MoeModel, artefacts: Artefacts, bits: int) -> tuple[MoeModel, Artefacts]:
    """The model with its replicas of so many bits for experts, and what is known of it then; both as they are where it
    has that base. All but the experts is shared: one session at a time.

    Raises Incompatible, with the command that mends it, where there are no such replicas.
    """
    if bits == opened.base:
        return opened, artefacts
    if artefacts.replicas is None:
        raise Incompatible(f"--base {bits} takes stored replicas, and there are none: run `moectl quantize`")
    replicas = artefacts.replicas.on_base(bits)
    store = open_replicas(opened, artefacts.replicas, [bits])[bits]
    shape = replace(opened.shape, expert_nbytes=store.layout.nbytes, num_neurons=0, neuron_nbytes=1)
    return replace(opened, store=store, shape=shape, base=bits), replace(artefacts, replicas=replicas)
