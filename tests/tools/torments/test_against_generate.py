"""The torment against plain generate(): cases pass, and a changed token is told."""

import random
from pathlib import Path

import pytest

from tests.helpers.families import FAMILIES, VOCABULARY
from tests.helpers.varied import VARIED
from tools.torments import lossless
from tools.torments.cases import Lost, against_generate
from tools.torments.cases.against_generate import AgainstGenerate


def test_a_changed_token_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torment = AgainstGenerate(tmp_path)
    assert torment.one(random.Random("3")).startswith(tuple(FAMILIES))

    def other_token(said: list[list[int]], *rest: object) -> None:
        said[0][-1] = (said[0][-1] + 1) % VOCABULARY
        compare(said, *rest)

    compare = against_generate._compare
    monkeypatch.setattr(against_generate, "_compare", other_token)
    with pytest.raises(Lost, match="by plain generate"):
        torment.one(random.Random("3"))


def test_every_family_and_set_of_fields_comes_in_every_dtype() -> None:
    choices = lossless._choices()
    assert {(family, number, dtype) for family, number, dtype, _ in choices} == {
        (family, number, dtype)
        for family in FAMILIES
        for number in range(len(VARIED[family]) + 1)
        for dtype in lossless.DTYPES
    }
    assert {(family, stored) for family, _, _, stored in choices} == {
        (family, stored) for family in FAMILIES for stored in lossless.FORMATS
    }
