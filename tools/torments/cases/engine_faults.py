"""Everything that can go wrong while a session runs; the next request must be exact, and nothing may stay behind."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from artifacts.errors import OutOfResources, Problem
from runtime.session.generate import Sampling
from runtime.session.interleave import Generation, Interleave
from runtime.session.session import Session
from tools.torments import lossless
from tools.torments.cases import Lost
from tools.torments.engine_checks import Held, check
from tools.torments.faulty_links import Faults, failing, held, installed, sleeping
from tools.torments.interrupting import Instructions, OutOfMemory, allocations
from tools.torments.lossless import Model, Models, Request

_MANY, _LONG = 1000, "17: a thousand requests"


class EngineFaults:
    """Failing, stalling and reordering links, allocations, interruptions at any instruction, broken-off generations,
    threads, over every preset that loses nothing."""

    classes = (17, 18)
    share = 4.0

    def __init__(self, ground: Path) -> None:
        torch.set_num_threads(1)
        self._models = Models(ground)
        model = self._models.draw(random.Random(0))
        for fault in _FAULTS:  # imports and kernels, which stay, are there before anything is counted
            if fault != _LONG:
                _Case(model, random.Random(0)).run(fault)

    def one(self, rng: random.Random) -> str:
        case, fault = _Case(self._models.draw(rng), rng), rng.choices(list(_FAULTS), weights=_WEIGHTS)[0]
        before = Held.now()
        case.run(fault)
        Held.now().check(before, f"{fault} ({case.told})")
        return fault


class _Case:
    def __init__(self, model: Model, rng: random.Random) -> None:
        self.model, self.rng, self.faults = model, rng, Faults()
        self.settings = lossless.draw_settings(rng, model.opened.shape)
        self.told = f"{model.name}, {lossless.described(self.settings)}"
        self.expected = self._expected()

    def _expected(self) -> list[list[torch.Tensor]]:
        """The logits of every request: the plain model's where a session owes its bits, else those of one that nothing
        happens to."""
        with self.session() as session:
            self.is_exact = lossless.is_exact(session)
            if self.is_exact:
                return [request.logits for request in self.model.requests]
            return [lossless.said(session, request) for request in self.model.requests]

    def run(self, fault: str) -> None:
        try:
            with installed(self.faults), self.session() as session:
                for _ in range(self.rng.randint(1, 3)):
                    for _ in range(self.rng.randint(0, 2)):
                        self.exact(session, "a request before")
                    _FAULTS[fault](self, session)
                    self.faults.mend()
                    check_books = fault != "18: interrupted"  # the books are put right when the next pass begins
                    if check_books:
                        check(session, fault)
                    self.exact(session, fault)
                    self.exact(session, fault)
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
        """What a request says that it should not."""
        number = self.rng.randrange(len(self.expected))
        return self.differs(lossless.said(session, self.model.requests[number]), self.expected[number])

    def differs(self, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> str:
        """Parts of cut experts add up as they come, which in bfloat16 can send a token elsewhere."""
        is_owed = self.is_exact or self.model.opened.dtype is torch.float32
        return lossless.differs(ours, theirs, to_the_bit=self.is_exact) if is_owed else ""

    @contextmanager
    def ends_with(self, *errors: type[BaseException]) -> Iterator[None]:
        """The request may end with one of these, or go well where the fault never came to pass."""
        try:
            yield
        except errors:
            return

    # Faults

    def transfer_fails(self, session: Session) -> None:
        error = self.rng.choice((lambda: OSError(5, "Input/output error"), MemoryError, lambda: RuntimeError("broken")))
        self.faults.moving = failing(self.rng.randint(0, 40), error)
        with self.ends_with(Problem, OSError, MemoryError, RuntimeError):
            lossless.said(session, self.request())

    def issue_fails(self, session: Session) -> None:
        self.faults.issuing = failing(self.rng.randint(0, 40), lambda: MemoryError())
        with self.ends_with(MemoryError):
            lossless.said(session, self.request())

    def everything_fails(self, session: Session) -> None:
        share, rng = self.rng.choice((0.05, 0.3, 1.0)), random.Random(self.rng.random())

        def fault(number: int) -> None:
            if rng.random() < share:
                raise OSError(5, "Input/output error")

        self.faults.moving = fault
        for _ in range(3):
            with self.ends_with(Problem, OSError):
                lossless.said(session, self.request())
            check(session, "a link that fails")

    def slow_and_reordered(self, session: Session) -> None:
        rng = random.Random(self.rng.random())
        self.faults.moving = sleeping(lambda number: rng.random() * 3e-3)
        self.faults.landing = lambda number: rng.random() < 0.5
        self.exact(session, "17: a link that reorders")

    def stuck(self, session: Session) -> None:
        """One read does not come back for longer than the link has patience, and then does."""
        if self.settings.link != "disk":
            self.slow_and_reordered(session)
            return
        gate = threading.Event()
        self.faults.moving, self.faults.patience_s = held(self.rng.randint(0, 10), gate), 0.2
        begin_s = time.perf_counter()
        try:
            for _ in range(2):
                with self.ends_with(OutOfResources):
                    lossless.said(session, self.request())
                check(session, "a link that is stuck")
        finally:
            gate.set()
        if time.perf_counter() - begin_s > 20:
            raise Lost(f"17: {time.perf_counter() - begin_s:.0f} s until a stuck link was told")

    def out_of_memory(self, session: Session) -> None:
        request = self.request()
        with OutOfMemory() as counted:
            lossless.said(session, request)
        with self.ends_with(torch.OutOfMemoryError, Problem), OutOfMemory(self.rng.randint(1, counted.count)):
            lossless.said(session, request)

    def building_fails(self, session: Session) -> None:
        """No memory for one of the allocations of a new session; the model is left as it was."""
        session.close()
        with allocations() as asked, self.session():
            num_allocations = len(asked)
        at = self.rng.randint(1, num_allocations)
        with self.ends_with(Problem, RuntimeError), allocations(at), self.session():
            pass
        session.__init__(self.model.opened, self.settings)

    def interrupted(self, session: Session) -> None:
        request = self.request()
        with Instructions() as counted:
            lossless.said(session, request)
        at = self.rng.randint(1, counted.count)
        with self.ends_with(KeyboardInterrupt), Instructions(at):
            lossless.said(session, request)

    def attention_fails(self, session: Session) -> None:
        """Whatever lies between two MoE layers."""
        at, seen = self.rng.randint(0, 6), []
        modules = [layer.gate for layer in self.model.opened.layers]

        def hook(*_: object) -> None:
            seen.append(1)
            if len(seen) > at:
                raise RuntimeError("out of memory in attention")

        handles = [module.register_forward_pre_hook(hook) for module in modules]
        try:
            with self.ends_with(RuntimeError):
                lossless.said(session, self.request())
        finally:
            for handle in handles:
                handle.remove()

    def generation_closed(self, session: Session) -> None:
        tokens = session.generate(self.prompt(), Sampling(20, ignore_eos=True))
        for _ in range(self.rng.randint(0, 5)):
            next(tokens)
        if self.rng.random() < 0.5:
            tokens.close()
        else:
            with self.ends_with(KeyboardInterrupt, StopIteration):
                tokens.throw(KeyboardInterrupt())

    def session_closed(self, session: Session) -> None:
        """While it generates, by another thread or this one; what is read after it ends with a reason."""
        tokens = session.generate(self.prompt(), Sampling(200, ignore_eos=True))
        next(tokens)
        session.close()
        with self.ends_with(Problem):
            if len(list(tokens)) < 199:
                raise Lost("18: a generation that was closed ends as if it were whole")
        session.__init__(self.model.opened, self.settings)

    def threads(self, session: Session) -> None:
        """Several at once, one of which is broken off: the others get all of their tokens."""
        prompts = [self.prompt() for _ in range(3)]
        alone = [[token.token_id for token in session.generate(prompt, _SHORT)] for prompt in prompts]
        aborted, found = self.rng.randrange(3), [[] for _ in prompts]

        def run(number: int) -> None:
            for token in session.generate(prompts[number], _SHORT):
                found[number].append(token.token_id)
                if number == aborted and len(found[number]) == 2:
                    break

        workers = [threading.Thread(target=run, args=(number,)) for number in range(len(prompts))]
        for worker in workers:
            worker.start()
        wrong = self.wrong(session)
        for worker in workers:
            worker.join(60)
        others = [number for number in range(3) if number != aborted]
        if wrong or any(found[number] != alone[number] for number in others):
            raise Lost(f"18: {wrong or found} of threads, alone {alone}")

    def in_turns(self, session: Session) -> None:
        """Several that are served pass by pass: one is left, another may fail, and the others get all of their
        tokens."""
        prompts = [self.prompt() for _ in range(3)]
        alone = [[token.token_id for token in session.generate(prompt, _SHORT)] for prompt in prompts]
        self.faults.mend()
        if self.rng.random() < 0.5:
            self.faults.moving = failing(self.rng.randint(0, 40), MemoryError)
        rows, left, failed = Interleave(session), self.rng.randrange(3), set()
        generations = [rows.begin(prompt, _SHORT) for prompt in prompts]
        found: list[list[int]] = [[] for _ in prompts]
        try:
            while not all(one.is_over for one in generations):
                for number, one in enumerate(generations):
                    if number == left and len(found[number]) == 2:
                        one.close()
                    elif not one.is_over and not self._step(one, found[number]):
                        failed.add(number)
        finally:
            for one in generations:
                one.close()
            rows.close()
        if len(failed) > 1 or any(found[n] != alone[n] for n in range(3) if n != left and n not in failed):
            raise Lost(f"18: {found} in turns, {failed} failed, alone {alone}")

    def _step(self, one: Generation, found: list[int]) -> bool:
        """Whether it went well."""
        try:
            turn = one.step()
        except MemoryError:
            return False
        found += [turn.token.token_id] if turn.token else []
        return True

    def row_aborted(self, session: Session) -> None:
        """Of a batch one request is given up between two tokens: the rest goes on as it does in the plain model."""
        keep = self.rng.sample(range(3), 2)
        ours = self._without_a_row(session.forward, keep)
        theirs = self._without_a_row(self._plain if self.is_exact else session.forward, keep)
        if wrong := self.differs(ours, theirs):
            raise Lost(f"18: after a row was given up: {wrong}")

    def _without_a_row(self, forward: Callable, keep: list[int]) -> list[torch.Tensor]:
        request = self.model.requests[2]
        output = forward(request.prompts)
        output.past_key_values.batch_select_indices(torch.tensor(keep))
        return [output.logits, forward(request.tokens[keep, :1], past=output.past_key_values).logits]

    def _plain(self, ids: torch.Tensor, *, past: object = None) -> object:
        with torch.inference_mode():
            return self.model.plain(ids, past_key_values=past, use_cache=True)

    def many(self, session: Session) -> None:
        """A thousand requests, every tenth of which fails: memory is what it was after the first hundred."""
        for number in range(_MANY):
            if number == 100:
                before = Held.now()
            if number % 10 == 0:
                self.transfer_fails(session)
                self.faults.mend()
            else:
                session.new_requests(1)
                session.forward(self.model.requests[0].prompts)
            session.fold()
        Held.now().check(before, "a thousand requests")

    def prompt(self) -> torch.Tensor:
        return self.model.requests[self.rng.choice((0, 1, 4))].prompts


_SHORT = Sampling(8, ignore_eos=True)
_FAULTS: dict[str, Callable[[_Case, Session], None]] = {
    "17: a transfer fails": _Case.transfer_fails,
    "17: an issue fails": _Case.issue_fails,
    "17: many transfers fail": _Case.everything_fails,
    "17: slow and reordered": _Case.slow_and_reordered,
    "17: stuck": _Case.stuck,
    "17: out of memory": _Case.out_of_memory,
    "17: no memory for a session": _Case.building_fails,
    _LONG: _Case.many,
    "18: interrupted": _Case.interrupted,
    "18: attention fails": _Case.attention_fails,
    "18: generation closed": _Case.generation_closed,
    "18: session closed": _Case.session_closed,
    "18: threads": _Case.threads,
    "18: in turns": _Case.in_turns,
    "18: a row given up": _Case.row_aborted,
}
_WEIGHTS = [0.1 if name == _LONG else 2 if "interrupted" in name else 1 for name in _FAULTS]
