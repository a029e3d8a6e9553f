"""The scheduler without HTTP: order, turns, shared passes and places in the queue, prompts that are
encoded, switches and the end."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from artifacts.errors import BadInput, BadUsage
from moectl.serving import running
from moectl.serving.guard import ServerLimits
from moectl.serving.jobs import Done, Encoded, Event, Failed, GenerationJob
from moectl.serving.scheduler import Closing, Full, Scheduler
from moectl.shared.batch_size import BatchSize
from moectl.shared.opening import cached_nbytes
from runtime.model.open import MoeModel
from runtime.session.generation.sampling import Sampling
from runtime.session.replies.pieces import TextPiece
from runtime.session.session import Session, Settings

WAIT_S = 10
LIMITS = ServerLimits(num_rows=2, num_waiting=1, max_tokens=200)
STOPPING = Failed("the server is stopping", 503)


class Asked(GenerationJob):
    """A job that keeps what it is told."""

    def __init__(self, num_tokens: int, prompt: str = "sheep", stops: tuple[str, ...] = ()) -> None:
        self.told: queue.Queue[Event] = queue.Queue()
        super().__init__(prompt, num_tokens, Sampling(ignore_eos=True), stops, self.told.put)

    def encoded_event(self) -> Event:
        return self.told.get(timeout=WAIT_S)

    def end(self) -> Done | Failed:
        while True:
            event = self.told.get(timeout=WAIT_S)
            if isinstance(event, Done | Failed):
                return event
            assert isinstance(event, Encoded | TextPiece)


Begin = Callable[..., Scheduler]


BOTH_WAYS = pytest.mark.parametrize("begin", [False, True], ids=["turns", "shared"], indirect=True)


@pytest.fixture
def begin(opened: MoeModel, request: pytest.FixtureRequest) -> Iterator[Begin]:
    """`begin(limits)` gives a running scheduler, whose presets are those of moectl; of `BOTH_WAYS`,
    one."""
    begun: list[Scheduler] = []

    def run(limits: ServerLimits = LIMITS, preset: str = "on-demand") -> Scheduler:
        limits = replace(
            limits, shares_passes=limits.shares_passes or getattr(request, "param", False)
        )
        begun.append(Scheduler(lambda name: session(opened, name), preset, limits))
        begun[-1].start()
        return begun[-1]

    yield run
    for scheduler in begun:
        closing = threading.Thread(target=scheduler.close, daemon=True)
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive() and not scheduler.is_alive
    assert not {"moectl-serve", "moectl-encode"} & {thread.name for thread in threading.enumerate()}


def session(opened: MoeModel, preset: str) -> Session:
    return Session(
        opened, Settings(preset=preset, budget="25%", link="disk", window="0B", threads=1)
    )


def outcomes(scheduler: Scheduler) -> dict[str, int]:
    return {name: count for name, count in scheduler.tally.read()["requests"].items() if count}


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


@contextmanager
def held(scheduler: Scheduler, job: GenerationJob) -> Iterator[list[int]]:
    """Submit `job` and hold its first pass in the block; the list gets the request of each pass."""
    entered = threading.Event()
    go = threading.Event()
    passes = []

    def wait(requests: torch.Tensor) -> None:
        passes.append(int(requests[0]))
        entered.set()
        assert go.wait(WAIT_S)

    scheduler.session.watcher.on_pass = wait
    scheduler.submit(job)
    assert entered.wait(WAIT_S)
    try:
        yield passes
    finally:
        go.set()


@contextmanager
def encoding(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Hold the first prompt that is encoded in the block; the list gets every prompt that was
    begun."""
    encode = scheduler.session.prompts.encode
    go = threading.Event()
    begun = []

    def wait(prompt: str) -> torch.Tensor:
        begun.append(prompt)
        assert go.wait(WAIT_S)
        return encode(prompt)

    monkeypatch.setattr(scheduler.session.prompts, "encode", wait)
    try:
        yield begun
    finally:
        go.set()


def test_requests_take_turns_of_four_passes_in_order_of_arrival(begin: Begin) -> None:
    scheduler = begin(ServerLimits(num_rows=3, num_waiting=0))
    jobs = [Asked(9), Asked(6)]
    with held(scheduler, Asked(1)) as passes:
        for job in jobs:
            scheduler.submit(job)
            assert job.encoded_event().ids.shape[0] == 1
        assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    ends = [job.end() for job in jobs]
    assert passes == [0, 1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1, 2, 2, 1]
    assert [end.num_tokens for end in ends] == [9, 6]
    assert (
        outcomes(scheduler) == {"answered": 3}
        and scheduler.num_running == scheduler.num_waiting == 0
    )


def test_a_request_goes_on_in_company_only_when_there_is_a_row(begin: Begin) -> None:
    scheduler = begin(ServerLimits(num_rows=1, num_waiting=2))
    jobs = [Asked(6), Asked(6)]
    with held(scheduler, Asked(6)) as passes:
        for job in jobs:
            scheduler.submit(job)
        wait_for(lambda: all(job.encoded for job in jobs))
    assert all(isinstance(job.end(), Done) for job in jobs)
    assert passes == [0] * 6 + [1] * 6 + [2] * 6


def test_requests_share_passes_in_order_of_arrival(begin: Begin) -> None:
    """The third one waits for a row."""
    scheduler = begin(ServerLimits(num_rows=2, num_waiting=1, shares_passes=True))
    jobs = [Asked(2), Asked(3)]
    with held(scheduler, Asked(3)) as passes:
        for job in jobs:
            scheduler.submit(job)
        wait_for(lambda: all(job.encoded for job in jobs))
        together: list[list[int]] = []
        held_pass = scheduler.session.watcher.on_pass
        watcher = scheduler.session.watcher
        watcher.on_pass = lambda requests: (
            together.append(sorted(set(requests.tolist()))),
            held_pass(requests),
        )
    assert [job.end().num_tokens for job in jobs] == [2, 3]
    assert together == [[0, 1], [0, 1], [2], [2], [2]] and passes[0] == 0
    assert outcomes(scheduler) == {"answered": 3} and scheduler.num_running == 0


def test_who_cannot_share_a_pass_is_answered_alone_and_it_is_said(begin: Begin) -> None:
    scheduler = begin(
        ServerLimits(num_rows=2, num_waiting=1, shares_passes=True), preset="monde-static"
    )
    other = Asked(3)
    with held(scheduler, Asked(3)) as passes:
        scheduler.submit(other)
        wait_for(lambda: other.encoded)
    other.end()
    assert passes == [0] * 3 + [1] * 3
    assert "one at a time: --residency" in " ".join(scheduler.receipt["fallbacks"])


def test_experts_placed_by_a_prompt_stay_for_its_answer(begin: Begin) -> None:
    scheduler = begin(ServerLimits(num_rows=3), preset="monde-static")
    other = Asked(6)
    with held(scheduler, Asked(6)) as passes:
        scheduler.submit(other)
        wait_for(lambda: other.encoded)
    other.end()
    assert passes == [0] * 6 + [1] * 6


def test_the_queue_has_as_many_places_as_were_asked_for(begin: Begin) -> None:
    scheduler = begin()
    for number in (1, 2):  # every place is given back
        jobs = [Asked(2) for _ in range(3)]
        with held(scheduler, jobs[0]):
            scheduler.submit(jobs[1])
            scheduler.submit(jobs[2])
            with pytest.raises(Full):
                scheduler.submit(Asked(2))
            scheduler.leave(jobs[2])
            scheduler.submit(again := Asked(2))
            with pytest.raises(Full):
                scheduler.submit(Asked(2))
        for job in (*jobs[:2], again):
            assert isinstance(job.end(), Done)
        assert outcomes(scheduler) == {
            "answered": 3 * number,
            "left": number,
            "refused": 2 * number,
        }


@BOTH_WAYS
def test_a_client_that_leaves_is_dropped(begin: Begin) -> None:
    scheduler = begin()
    running = Asked(50)
    waiting = Asked(50)
    with held(scheduler, running) as passes:
        scheduler.submit(waiting)
        waiting.encoded_event()
        scheduler.leave(waiting)
        assert (scheduler.num_running, scheduler.num_waiting, outcomes(scheduler)) == (
            1,
            0,
            {"left": 1},
        )
        scheduler.leave(running)
    wait_for(lambda: outcomes(scheduler) == {"left": 2})
    assert passes == [0] and scheduler.num_running == scheduler.num_waiting == 0
    answered = Asked(1)
    scheduler.submit(answered)
    assert answered.end().reason == "length"
    scheduler.leave(answered)
    assert outcomes(scheduler) == {"left": 2, "answered": 1} and scheduler.num_waiting == 0


def test_prompts_are_encoded_one_at_a_time_and_none_of_a_client_that_left(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = begin(ServerLimits(num_rows=2, num_waiting=3))
    jobs = [Asked(2, prompt) for prompt in ("sheep", "dog", "gate")]
    with encoding(scheduler, monkeypatch) as begun:
        for job in jobs:
            scheduler.submit(job)
        wait_for(lambda: begun == ["sheep"])
        assert scheduler.num_waiting == 3
        for job in jobs[:2]:
            scheduler.leave(job)
        assert outcomes(scheduler) == {"left": 2}
    assert isinstance(jobs[2].end(), Done)
    assert begun == ["sheep", "gate"] and outcomes(scheduler) == {"left": 2, "answered": 1}
    assert scheduler.num_running == scheduler.num_waiting == 0


def test_a_request_goes_on_while_another_prompt_is_encoded(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = begin(ServerLimits(num_rows=3))
    running = Asked(30)
    coming = [Asked(2, "dog"), Asked(2, "gate")]
    scheduler.submit(running)
    running.encoded_event()
    with encoding(scheduler, monkeypatch) as begun:
        for job in coming:
            scheduler.submit(job)
        assert running.end().num_tokens == 30
        wait_for(lambda: begun == ["dog"])
        scheduler.submit(ids := Asked(1, torch.tensor([[3]])))
        assert scheduler.num_running == 0 and scheduler.num_waiting == 3
    assert all(isinstance(job.end(), Done) for job in (*coming, ids))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (BadInput("no such word"), Failed("no such word", 400)),
        (OverflowError("too large"), Failed("the prompt cannot be encoded: too large", 400)),
        (RuntimeError("broken"), Failed("internal error: RuntimeError", 500)),
        (BaseException("a panic"), Failed("internal error: BaseException", 500)),
    ],
)
def test_a_prompt_that_cannot_be_encoded_fails_alone(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, error: BaseException, told: Failed
) -> None:
    scheduler = begin()
    with monkeypatch.context() as patch:
        patch.setattr(
            scheduler.session.prompts, "encode", lambda prompt: (_ for _ in ()).throw(error)
        )
        scheduler.submit(job := Asked(2))
        assert job.end() == told
        wait_for(lambda: outcomes(scheduler) == {"failed": 1})
    assert scheduler.num_waiting == 0
    scheduler.submit(job := Asked(2))
    assert isinstance(job.end(), Done)


def test_a_batch_is_chosen_by_memory(
    begin: Begin, opened: MoeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer of unknown length gets a quarter of the memory for keys and values, and what is
    asked for gets what it needs; requests that cannot share passes take turns."""
    scheduler = begin(ServerLimits(num_rows=None, shares_passes=True, num_positions=40))
    assert (scheduler.num_rows, scheduler.num_positions) == (running.USUAL_ROWS, 40)
    assert scheduler.sharing == "up to 32 requests share each pass"
    told = (
        "36 prompt tokens and 5 new ones exceed the 40 positions that are served: give fewer, or "
        "start the server with a larger --ctx-size"
    )
    for num_tokens, expected in ((None, 4), (4, 4), (5, told)):
        scheduler.submit(job := Asked(num_tokens, torch.full((1, 36), 7)))
        end = job.end()
        assert (end.num_tokens if isinstance(end, Done) else end.message) == expected
    monkeypatch.setattr(running, "_LEAST_SHARE", 1)
    size = BatchSize(2, 4 * 6 * cached_nbytes(opened))
    monkeypatch.setattr(running, "batch_size", lambda *_, **__: size)
    scheduler.switch("on-demand").settled.result(WAIT_S)
    for num_tokens, expected in ((None, 6), (7, 7)):
        scheduler.submit(job := Asked(num_tokens, torch.full((1, 4), 7)))
        assert job.end().num_tokens == expected
    monkeypatch.setattr(running, "why_one_by_one", lambda _: "an index of keys")
    scheduler.switch("on-demand").settled.result(WAIT_S)
    assert (scheduler.sharing, scheduler.num_rows) == ("8 requests take turns: an index of keys", 8)


def test_a_prompt_has_room_for_its_answer(begin: Begin) -> None:
    scheduler = begin(ServerLimits(max_tokens=9))
    positions = scheduler.session.opened.config.max_position_embeddings
    for length, num_tokens, told in (
        (positions - 5, None, 5),
        (4, None, 9),
        (positions - 3, 3, 3),
        (
            positions - 3,
            4,
            (
                f"{positions - 3} prompt tokens and 4 new ones exceed the model's {positions} "
                "positions"
            ),
        ),
        (
            positions,
            None,
            f"{positions} prompt tokens and 1 new ones exceed the model's {positions} positions",
        ),
    ):
        scheduler.submit(job := Asked(num_tokens, torch.full((1, length), 7)))
        match job.encoded_event():
            case Encoded(ids, sampling):
                assert (ids.shape[1], sampling.max_new_tokens) == (length, told)
                scheduler.leave(job)
            case Failed(message, status, code):
                assert message.startswith(told) and (status, code) == (
                    400,
                    "context_length_exceeded",
                )


@BOTH_WAYS
def test_a_request_that_fails_ends_alone(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    """At its beginning and in a pass, by an error of ours or another, which is logged."""
    scheduler = begin()

    for error, told in (
        (ValueError("broken"), "internal error: ValueError"),
        (BadInput("a bad pass"), "a bad pass"),
    ):

        def fail(requests: torch.Tensor, error: Exception = error) -> None:
            scheduler.session.watcher.on_pass = None
            raise error

        scheduler.session.watcher.on_pass = fail
        scheduler.submit(job := Asked(5))
        assert job.end() == Failed(told, 500)
    scheduler.submit(job := Asked(5, stops=None))
    assert job.end() == Failed("internal error: TypeError", 500)
    assert [record.exc_info[0] for record in caplog.records] == [ValueError, TypeError]
    assert (
        outcomes(scheduler) == {"failed": 3} and scheduler.num_running == scheduler.num_waiting == 0
    )
    scheduler.submit(job := Asked(5))
    assert isinstance(job.end(), Done)


@BOTH_WAYS
def test_a_switch_keeps_its_place_in_the_order(begin: Begin) -> None:
    scheduler = begin()
    first = Asked(5)
    second = Asked(5)
    with held(scheduler, first):
        cancelled = scheduler.switch("near")
        switch = scheduler.switch("specmd")
        assert cancelled.settled.cancel()
        scheduler.submit(second)
        second.encoded_event()
        assert scheduler.num_waiting == 1 and scheduler.preset == "on-demand"
    assert switch.settled.result(WAIT_S) is None
    assert [job.end().took["preset"] for job in (first, second)] == ["on-demand", "specmd"]
    assert (scheduler.preset, scheduler.receipt["preset"]) == ("specmd", "specmd")


def test_a_switch_waits_for_the_prompt_that_is_encoded(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session that encodes is not closed meanwhile."""
    scheduler = begin()
    before = scheduler.session
    are_closed = []
    begun = threading.Event()
    job = Asked(2)

    def encode(prompt: str) -> None:
        begun.set()
        time.sleep(0.3)
        are_closed.append(before._is_closed)

    monkeypatch.setattr(before.prompts, "encode", encode)
    with held(scheduler, Asked(1, torch.tensor([[7]]))):
        switch = scheduler.switch("near")
        scheduler.submit(job)
        assert begun.wait(WAIT_S)
    switch.settled.result(WAIT_S)
    assert are_closed == [False] and job.end() == Failed("internal error: AttributeError", 500)


def test_a_switch_waits_for_the_prompts_before_it(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = begin()
    with encoding(scheduler, monkeypatch) as begun:
        scheduler.submit(job := Asked(2))
        wait_for(lambda: begun)
        switch = scheduler.switch("near")
    assert job.end().took["preset"] == "on-demand" and switch.settled.result(WAIT_S) is None


def test_a_switch_that_fails_changes_nothing(begin: Begin) -> None:
    scheduler = begin()
    with pytest.raises(BadUsage):
        scheduler.switch("nearest").settled.result(WAIT_S)
    assert scheduler.preset == "on-demand"
    scheduler.submit(job := Asked(2))
    assert job.end().took["preset"] == "on-demand"


@BOTH_WAYS
def test_who_is_there_at_the_end_is_told(begin: Begin) -> None:
    scheduler = begin()
    running = Asked(50)
    waiting = Asked(50)
    with held(scheduler, running):
        scheduler.submit(waiting)
        waiting.encoded_event()
        switch = scheduler.switch("near")
        cancelled = scheduler.switch("near")
        assert cancelled.settled.cancel()
        closing = threading.Thread(target=scheduler.close)
        closing.start()
        wait_for(lambda: not scheduler.is_alive)
        for ask in (lambda: scheduler.submit(Asked(2)), lambda: scheduler.switch("near")):
            with pytest.raises(Closing):
                ask()
    closing.join()
    assert running.end() == waiting.end() == STOPPING and outcomes(scheduler) == {"failed": 2}
    with pytest.raises(Closing):
        switch.settled.result(WAIT_S)
    assert scheduler.num_running == scheduler.num_waiting == 0


def test_a_scheduler_without_a_session_ends(opened: MoeModel) -> None:
    """At the start it raises the error; later, requests are told."""
    fails = threading.Event()

    def build(preset: str) -> Session:
        if fails.is_set():
            raise BadInput("no session")
        return session(opened, preset)

    scheduler = Scheduler(build, "on-demand", LIMITS)
    scheduler.start()
    # they hold up no interpreter that ends
    assert scheduler._thread.daemon and scheduler._encoder.daemon
    with held(scheduler, Asked(1)):
        switch = scheduler.switch("near")
        scheduler.submit(job := Asked(2))
        fails.set()
    with pytest.raises(BadInput, match="no session"):
        switch.settled.result(WAIT_S)
    assert job.end() == STOPPING
    wait_for(lambda: not scheduler.is_alive)
    scheduler.close()
    with pytest.raises(BadInput, match="no session"):
        Scheduler(build, "on-demand", LIMITS).start()
