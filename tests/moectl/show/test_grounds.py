"""What may be said of a time."""

import pytest

from artifacts.hardware.machines import MACHINES
from artifacts.modelshapes.known import MODELS, model_shape
from moectl.show.grounds import compared, measured, simulated

BUNDLED = 6 << 20


def test_a_toy_on_a_data_sheet_has_ratios_alone() -> None:
    on_sheet = simulated("a100-pcie4", BUNDLED)
    assert (
        not on_sheet.is_absolute
        and "virtual time" in on_sheet.says
        and "a100-pcie4" in on_sheet.says
    )
    assert simulated("here", BUNDLED).is_absolute


@pytest.mark.parametrize("name", MODELS)
def test_no_published_model_is_a_toy(name: str) -> None:
    assert simulated("a100-pcie4", model_shape(name).shape.nbytes).is_absolute


def test_proportions_of_a_machine_are_no_times_of_it() -> None:
    for machine in MACHINES:
        assert (
            not measured(machine).is_absolute
            and f"in the proportions of {machine}" in measured(machine).says
        )
    assert (
        measured("auto").is_absolute
        and measured("cuda", device="cuda:0").says == "measured on this GPU"
    )
    assert measured("5GB/s").is_absolute and "emulated link of 5GB/s" in measured("5GB/s").says


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(3.45, "3.5 times slower"), (0.5, "2.0 times faster"), (1.03, "as fast"), (0.98, "as fast")],
)
def test_ratios_in_words(ratio: float, words: str) -> None:
    assert compared(ratio) == words
