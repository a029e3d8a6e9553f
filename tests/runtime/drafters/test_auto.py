"""The choice among drafters: the best that has drafts, and none where a plain pass is best."""

from runtime.drafters.auto import Auto
from runtime.drafters.ngram import Ngram
from runtime.drafters.resident import Resident

TEXT = [1, 2, 3, 4, 1, 2]


def test_the_next_drafter_is_asked_where_the_best_has_no_drafts() -> None:
    auto = Auto({"ngram": Ngram(), "resident": Resident()})
    lengths = auto.lengths
    drafter = auto.begin(TEXT, None)
    assert drafter.propose(TEXT, 4) == []  # nothing is known of plain passes
    for _ in range(2):
        lengths.note(0, 0, pass_s=1.0, draft_s=0.0)
    drafts = drafter.propose(TEXT, 4)
    assert drafts == [3, 4, 1, 2][: len(drafts)] and drafts
    assert lengths.chosen == "ngram"
    for _ in range(40):
        lengths.note(1, 0, pass_s=2.0, draft_s=0.0)
        lengths.note(0, 0, pass_s=1.0, draft_s=0.0)
    assert drafter.propose(TEXT, 4) == []  # all of them were wrong, and resident costs too much
    assert auto.receipt() == {"ngram": {"least": 2, "most": 16}, "resident": {}}
    drafter.close()
