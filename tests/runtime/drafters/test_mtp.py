"""The checkpoint's own layer that predicts a further token: what it drafts is what its formula gives,
in every naming."""

from types import SimpleNamespace

import pytest

from runtime.drafters.mtp import Mtp
from runtime.model.open import open_model
from tests.helpers.further import FURTHER, Reference

PROMPT = [5, 9, 2, 14, 7, 7, 3, 1, 4, 11, 5, 9]


@pytest.mark.parametrize("case", FURTHER)
def test_drafts_are_those_of_the_formula(case: str, tmp_path) -> None:
    reference = Reference(FURTHER[case])
    opened = open_model(str(reference.save(tmp_path)))
    kind = Mtp.open(opened, None)
    drafter = kind.begin(PROMPT, None)
    tokens = list(PROMPT)

    def read(ids: list[int]) -> None:
        """As two passes of the model do."""
        hidden = reference.hidden([*tokens, *ids] if ids is not PROMPT else PROMPT)
        own = hidden[:, -len(ids) :]
        drafter.note(ids, SimpleNamespace(hidden_states=(own,)))

    hidden = reference.hidden(PROMPT)
    drafter.note(PROMPT[:7], SimpleNamespace(hidden_states=(hidden[:, :9],)))
    drafter.note(PROMPT[7:], SimpleNamespace(hidden_states=(hidden[:, 7:],)))
    tokens.append(8)
    drafts, _ = reference.drafts(tokens, 3)
    assert drafter.propose(tokens, 3) == drafts
    # of a pass over the last token and three drafts, one is accepted, and another token drawn
    for accepted, drawn in (([8, 6], 17), ([17], 3), ([3, 2, 9, 4], 12)):
        tokens = [*tokens[:-1], *accepted]
        hidden = reference.hidden(tokens)[:, -len(accepted) :]
        drafter.note(accepted, SimpleNamespace(hidden_states=(hidden,)))
        tokens.append(drawn)
        assert list(drafter.propose(tokens, 2)) == reference.drafts(tokens, 2)[0]
