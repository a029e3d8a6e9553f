"""How much a server takes on."""

from dataclasses import dataclass

from artifacts.errors import BadUsage


@dataclass(frozen=True, slots=True)
class Limits:
    """`num_rows` requests are answered at a time, `num_waiting` more wait; an answer has at most `max_tokens`."""

    num_rows: int = 8
    num_waiting: int = 64
    max_tokens: int = 1024
    body_nbytes: int = 4 << 20
    closing_s: float = 30.0  # what is under way may take so long to end, when the server is told to stop

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.num_waiting < 0 or self.max_tokens < 1:
            raise BadUsage("a server needs room for a request, and answers of at least one token")
