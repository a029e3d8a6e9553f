"""The built-in task is made of text that the bundled model has not seen, and its answers are what
really follows."""

import pytest

from profilers.compare.continuations import CHOICES, COUNT, items
from profilers.text.python import docstrings

pytestmark = pytest.mark.slow


def test_the_right_passage_is_followed_by_the_text_and_the_others_are_of_other_modules() -> None:
    held_out = {document.name: document.text for document in docstrings(held_out=True)}
    made = items(COUNT)
    assert len(made) >= 400 and made[:50] == items(50)
    for item in made:
        right = item["passages"][item["answer"]] + item["text"]
        module = next(name for name, text in held_out.items() if right in text)
        others = [passage for at, passage in enumerate(item["passages"]) if at != item["answer"]]
        assert len(others) == CHOICES - 1
        assert all(
            any(other in text for name, text in held_out.items() if name != module)
            for other in others
        )


def test_no_place_among_the_choices_is_right_more_often_than_chance() -> None:
    answers = [item["answer"] for item in items(COUNT)]
    assert all(answers.count(place) < 1.3 * COUNT / CHOICES for place in range(CHOICES))
