"""Experts as they are there, for passes of all layers in one call that load nothing."""

from collections.abc import Container
from typing import Self

import numpy as np

from artifacts.shape import FULL_BITS
from runtime.backends.cpu.form import LayerForm
from runtime.backends.cpu.forms_cpu import forms_of
from runtime.backends.cpu.forms_trellis import CpuTrellis
from runtime.control.cache import RESIDENT, Cache
from runtime.kernels.cpu.decoder.compiled_layers import WholeExperts
from runtime.kernels.load import kernels
from runtime.model.open import MoeModel
from runtime.tiers.fast import ResidentExperts


class PresentExperts:
    """Addresses of the experts in slots, of the resident replicas of others, and of replicas that
    are in slots. What has neither is left out."""

    def __init__(
        self,
        opened: MoeModel,
        resident: ResidentExperts,
        layout: LayerForm,
        coded: CpuTrellis | None,
    ) -> None:
        shape = opened.shape
        self._size = shape.num_layers, shape.num_experts
        self._slots = [slot.data_ptr() for slot in resident.slots]
        self._layout = np.tile(np.array(layout.matrices), (shape.num_layers, 1, 1))
        self._num_neurons = layout.num_neurons
        self._coded = coded
        whole_layer = kernels("cpu.whole_layer")
        shadows = resident.shadows
        absent = 0 if shadows else whole_layer.LEFT_OUT
        self._starts = np.full(shape.num_keys, absent, np.int64)
        self._replicas = (
            coded.of_layers(shadows, *self._size)
            if coded
            else whole_layer.no_replicas(shape.num_layers)
        )

    @classmethod
    def of(cls, opened: MoeModel, resident: ResidentExperts) -> Self | None:
        """Return the experts of these slots and replicas; None where no kernel takes them all."""
        forms = forms_of(resident.slow, resident.shadows, opened)
        full = forms.pop(FULL_BITS, None)
        layout = full.whole() if full else None
        if layout is None or not all(isinstance(form, CpuTrellis) for form in forms.values()):
            return None
        return cls(opened, resident, layout, next(iter(forms.values()), None))

    def whole(self, cache: Cache, coming: Container[int]) -> WholeExperts:
        """Return the experts of all layers but those whose slot is in `coming`."""
        starts = self._starts.copy()
        low = []
        for place in filter(None, cache.places):
            if cache.states[place.key] == RESIDENT and place.slot not in coming:
                is_low = place.bits != FULL_BITS
                starts[place.key] = 0 if is_low else self._slots[place.slot]
                if is_low:
                    low.append(place)
        replicas = self._replicas
        if low:
            keys = [place.key for place in low]
            tables = self._coded.tables(
                [place.bits for place in low], [self._slots[place.slot] for place in low]
            )
            functions, addresses, sizes, rotations = replicas
            copies = addresses.copy(), sizes.copy()
            for copy, own in zip(copies, tables, strict=True):
                copy.reshape(-1, *copy.shape[2:])[keys] = own
            replicas = functions, *copies, rotations
        return WholeExperts(starts.reshape(self._size), self._layout, self._num_neurons, replicas)
