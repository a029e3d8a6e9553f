"""Sums of the work of answering prompts: answers, tokens, seconds and counters, of one process or
of many."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class BatchWork:
    """Answers, tokens of prompts and answers, passes of the model and their counters. `exposed_ms`
    are the milliseconds in which compute waited for the link, `seconds` are on the clock."""

    num_answers: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_passes: int = 0
    seconds: float = 0.0
    counters: Counter = field(default_factory=Counter)
    exposed_ms: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers per second."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def add(self, other: "BatchWork") -> None:
        """Add the work of another process. Its seconds are not added: both ran at the same time."""
        self.num_answers += other.num_answers
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_tokens += other.num_tokens
        self.num_passes += other.num_passes
        self.counters.update(other.counters)
        self.exposed_ms += other.exposed_ms
