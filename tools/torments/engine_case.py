"""One case of the torment `engine_faults`: a session under faults, and the check that later
requests are exact."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from runtime.session.session import Session
from tools.torments import lossless
from tools.torments.cases import Lost
from tools.torments.engine_checks import check
from tools.torments.faulty_links import Faults, installed
from tools.torments.lossless import Model, Request


class EngineCase:
    """One model, settings and link faults, with the logits that every request must give."""

    def __init__(self, model: Model, rng: random.Random) -> None:
        self.model = model
        self.rng = rng
        self.faults = Faults()
        self.settings = lossless.draw_settings(rng, model.opened.shape)
        self.told = f"{model.name}, {lossless.described(self.settings)}"
        self.expected = self._expected()

    def _expected(self) -> list[list[torch.Tensor]]:
        """Return the logits of every request: the plain model's where a session must equal it bit
        for bit, else the logits of a session without faults."""
        with self.session() as session:
            self.is_exact = lossless.is_exact(session)
            if self.is_exact:
                return [request.logits for request in self.model.requests]
            return [lossless.said(session, request) for request in self.model.requests]

    def run(self, name: str, fault: "Fault") -> None:
        """Meet the fault in a session one to three times; later requests must be exact. Raises
        Lost."""
        try:
            with installed(self.faults), self.session() as session:
                for _ in range(self.rng.randint(1, 3)):
                    for _ in range(self.rng.randint(0, 2)):
                        self.exact(session, "a request before")
                    fault(self, session)
                    self.faults.mend()
                    # after which the next pass repairs the controller's state
                    if name != "18: interrupted":
                        check(session, name)
                    self.exact(session, name)
                    self.exact(session, name)
        except Lost as problem:
            raise Lost(f"{problem} [{self.told}]") from problem

    def session(self) -> Session:
        return Session(self.model.opened, self.settings)

    def request(self) -> Request:
        return self.rng.choice(self.model.requests)

    def exact(self, session: Session, after: str) -> None:
        if wrong := self.wrong(session):
            raise Lost(f"{after[:2] if after[0] == '1' else 17}: after {after}: {wrong}")
        check(session, after)

    def wrong(self, session: Session) -> str:
        """Return how the logits of a random request are wrong; empty if they are right."""
        number = self.rng.randrange(len(self.expected))
        return self.differs(
            lossless.said(session, self.model.requests[number]), self.expected[number]
        )

    def differs(self, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> str:
        """Return how the logits differ; empty if they agree or need not agree. Split experts add up
        in order of arrival, so that bfloat16 may route otherwise."""
        is_owed = self.is_exact or self.model.opened.dtype is torch.float32
        return lossless.differs(ours, theirs, to_the_bit=self.is_exact) if is_owed else ""

    @contextmanager
    def ends_with(self, *errors: type[BaseException]) -> Iterator[None]:
        """The request may end with one of these errors, or succeed if the fault did not occur."""
        try:
            yield
        except errors:
            return

    def plain(self, ids: torch.Tensor, *, past: object = None) -> object:
        """The output of the plain model."""
        with torch.inference_mode():
            return self.model.plain(ids, past_key_values=past, use_cache=True)

    def prompt(self) -> torch.Tensor:
        return self.model.requests[self.rng.choice((0, 1, 4))].prompts


Fault = Callable[[EngineCase, Session], None]
