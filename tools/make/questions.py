"""Writes moectl's own task for lm-evaluation-harness: word problems with worked answers, and four sums to choose from.

    python -m tools.make.questions            profilers/compare/questions/word_problems.jsonl

The problems are those of `tools.make.word_problems`, of a seed that the bundled model was not trained on. Every step of
the answer is given but the number that the last one comes to; the wrong ones are near it.
"""

import json
import random

from artifacts.common.files import replacing
from tools import ROOT
from tools.make.word_problems import KINDS

TARGET = ROOT / "profilers" / "compare" / "questions" / "word_problems.jsonl"
SEED, COUNT, CHOICES = 20_261_121, 32, 4
DIFFERENCES = (-20, -10, -2, -1, 1, 2, 10, 20)


def main() -> None:
    r = random.Random(SEED)
    lines = [json.dumps(_document(r)) for _ in range(COUNT)]
    with replacing(TARGET) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{TARGET.name}: {len(lines)} questions")


def _document(r: random.Random) -> dict[str, object]:
    question, steps, answer = r.choice(KINDS)(r)
    near = sorted({answer + difference for difference in DIFFERENCES if answer + difference >= 0})
    choices = [answer, *r.sample(near, CHOICES - 1)]
    r.shuffle(choices)
    return {
        "question": question,
        "steps": " ".join(steps).rpartition(" = ")[0],
        "choices": [str(choice) for choice in choices],
        "answer": choices.index(answer),
    }


if __name__ == "__main__":
    main()
