"""One program that answers a batch with experts on disk, in a process of its own that imports only
what it needs.

python -m tools.bench.disk.batch_way WAY MODEL        WAY as JSON; tools.bench.disk.batch compares them
"""

import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.bench.disk.way import OURS, Way, open_way, read_nbytes

PROMPT = 32  # tokens


@dataclass(frozen=True, slots=True)
class BatchWay:
    """A program, the requests that it answers together, and the tokens of each answer."""

    way: Way
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class BatchReading:
    """Seconds from the first prompt to the last token, the model being open; bytes read from the
    device meanwhile."""

    seconds: float
    read_nbytes: int


def main() -> None:
    given = json.loads(sys.argv[1])
    way = BatchWay(Way(**given.pop("way")), **given)
    print(json.dumps(asdict(measure(way, Path(sys.argv[2])))))


def measure(asked: BatchWay, folder: Path) -> BatchReading:
    """Answer all requests greedily with one thread."""
    import torch

    torch.set_num_threads(1)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-disk-")))
        opened = stack.enter_context(open_way(asked.way, folder, scratch))
        vocab_size = (opened.opened.model if asked.way.name == OURS else opened).config.vocab_size
        ids = torch.randint(3, vocab_size, (asked.rows, PROMPT), generator=torch.manual_seed(0))
        read = read_nbytes()
        begin_s = time.perf_counter()
        (_by_moectl if asked.way.name == OURS else _by_transformers)(opened, ids, asked.tokens)
        return BatchReading(time.perf_counter() - begin_s, read_nbytes() - read)


def _by_moectl(session: object, ids: object, tokens: int) -> None:
    from runtime.session.batch import RequestBatch
    from runtime.session.generate import Sampling

    with RequestBatch(session, rows=len(ids)) as batch:
        for prompt in ids:
            batch.add(prompt[None], Sampling(max_new_tokens=tokens, ignore_eos=True))
        given = 0
        while not batch.is_idle:
            given += sum(result.token_id is not None for result in batch.step())
    assert given == len(ids) * tokens, "a request got no answer"


def _by_transformers(model: object, ids: object, tokens: int) -> None:
    """Answer all in one static batch: all prompts have the same length, so that nothing is
    padded."""
    answers = model.generate(
        ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=1
    )
    assert answers.shape == (len(ids), PROMPT + tokens)


if __name__ == "__main__":
    main()
