"""Threads that wait for work in compiled code, without the GIL: they spin for some ten microseconds
and then sleep. Importing this module imports numba.

A team shares one `state`, int64 [STATE]. Its JOB changes whenever there is work: the number of the
job, how many threads take part, and whether they call a compiled function or go back to Python, or
shall only be awake. Threads that take no part read nothing else of a job.

Threads that call a compiled function take pieces of its work one after another, so that no piece
waits for a thread that sleeps or has lost its core: a thread that comes late enters, finds the job
over, and leaves.
"""

import os
import platform
from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.numba_loops import kernel, part

# Places in a state, each in a line of the cache of its own: the job, how many threads sleep, how
# many have done their part in Python, how many have entered compiled jobs and how many have left
# them, a function and its operand, COUNTERS for its pieces, and what POSIX threads wait with.
JOB, SLEEPING, DONE, ENTERED, LEFT, FUNCTION, OPERAND, MUTEX, CONDITION = range(0, 72, 8)
COUNTERS = CONDITION + 16
_NUM_COUNTERS = 6
STATE = COUNTERS + 8 * _NUM_COUNTERS
# Kinds of a job; OVER follows a compiled one that no thread may enter any more.
COMPILED, PYTHON, CLOSE, WAKE, OVER = range(5)
KIND = 7  # the bits of a job that hold its kind
_SHARES = 3  # the bits behind them hold the number of threads that take part
_NUMBER = 23  # and those behind these its own number

_CAN_SLEEP = os.name == "posix"
_HAS_PAUSE = platform.machine() in ("x86_64", "AMD64")
_SPINS = 2000  # pauses until a thread without work sleeps: 20 to 100 us
_SPINS_AWAKE = 10_000  # the same while work is about to come
_FEW_SPINS = 200  # pauses until a thread that waits for another lets others run
_INT = ir.IntType(32)
_WORD = ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()


@intrinsic
def _loaded(context, address):
    """Return the int64 at this address, and see all that was written before it."""

    def generate(_, builder, __, arguments):
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.load_atomic(place, "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _store(context, address, value):
    """Write an int64 at this address, after all that was written before."""

    def generate(target, builder, __, arguments):
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        builder.store_atomic(arguments[1], place, "seq_cst", 8)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _add(context, address, value):
    """Add to the int64 at this address, and return what it was before."""

    def generate(_, builder, __, arguments):
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def call(context, address, operands):
    """Call the kernel at this address, one that returns nothing, with a tuple of its operands."""

    def generate(target, builder, signature, arguments):
        kinds = signature.args[1].types
        function = target.call_conv.get_function_type(types.none, kinds)
        results = [cgutils.alloca_once(builder, place.pointee) for place in function.args[:2]]
        values = cgutils.unpack_tuple(builder, arguments[1])
        packed = target.get_arg_packer(kinds).as_arguments(builder, values)
        builder.call(builder.inttoptr(arguments[0], function.as_pointer()), [*results, *packed])
        return target.get_dummy_value()

    return types.void(address, operands), generate


def _called(name: str, result: ir.Type = _INT) -> Callable:
    """Return the code of a call of a function of the system's, whose operands are addresses."""

    def generate(target, builder, _, arguments):
        kind = ir.FunctionType(result, [_BYTES] * len(arguments))
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(function, [builder.inttoptr(each, _BYTES) for each in arguments])
        return target.get_dummy_value()

    return generate


def _of_none(name: str, result: ir.Type = _INT) -> Callable:
    return intrinsic(lambda context: (types.void(), _called(name, result)))


def _of_one(name: str) -> Callable:
    return intrinsic(lambda context, one: (types.void(types.int64), _called(name)))


def _of_two(name: str) -> Callable:
    return intrinsic(
        lambda context, one, two: (types.void(types.int64, types.int64), _called(name))
    )


_pause = _of_none("llvm.x86.sse2.pause", ir.VoidType())
_yield = _of_none("sched_yield")
_lock = _of_one("pthread_mutex_lock")
_unlock = _of_one("pthread_mutex_unlock")
_signal_all = _of_one("pthread_cond_broadcast")
_wait_for_signal = _of_two("pthread_cond_wait")
_init_mutex = _of_two("pthread_mutex_init")
_init_condition = _of_two("pthread_cond_init")


@part
def _relax():
    if _HAS_PAUSE:
        _pause()


@part
def _let_others_run():
    if _CAN_SLEEP:
        _yield()


@part
def _at(state, place):
    return state.ctypes.data + 8 * place


@part
def _until(address, least):
    """Wait until the number at this address is at least that."""
    for _ in range(_FEW_SPINS):
        if _loaded(address) >= least:
            return
        _relax()
    while _loaded(address) < least:
        _let_others_run()


@part
def _until_all_have_left(state):
    """Wait until no thread is in the job, which is over: a thread that enters now leaves at once.
    LEFT must be read before ENTERED: then equal numbers prove that no thread was in the job."""
    left = _at(state, LEFT)
    entered = _at(state, ENTERED)
    for _ in range(_FEW_SPINS):
        if _loaded(left) == _loaded(entered):
            return
        _relax()
    while _loaded(left) != _loaded(entered):
        _let_others_run()


@part
def _next(state, seen):
    """Wait for another job than `seen`, and return it."""
    job = _at(state, JOB)
    for _ in range(_SPINS_AWAKE if seen & KIND == WAKE else _SPINS):
        if _loaded(job) != seen:
            return _loaded(job)
        _relax()
    if _CAN_SLEEP:
        mutex = _at(state, MUTEX)
        _lock(mutex)
        _add(_at(state, SLEEPING), 1)
        while _loaded(job) == seen:
            _wait_for_signal(_at(state, CONDITION), mutex)
        _add(_at(state, SLEEPING), -1)
        _unlock(mutex)
    while _loaded(job) == seen:
        _relax()
    return _loaded(job)


@kernel("void(int64[::1])")
def prepare(state):
    """Make a state of zeros ready for a team."""
    if _CAN_SLEEP:
        _init_mutex(_at(state, MUTEX), 0)
        _init_condition(_at(state, CONDITION), 0)


@part
def _post(state, kind, num_shares):
    number = (_loaded(_at(state, JOB)) >> _NUMBER) + 1
    job = number << _NUMBER | num_shares << _SHARES | kind
    _store(_at(state, JOB), job)
    if _CAN_SLEEP and kind != OVER and _loaded(_at(state, SLEEPING)):
        _lock(_at(state, MUTEX))
        _signal_all(_at(state, CONDITION))
        _unlock(_at(state, MUTEX))


@kernel("void(int64[::1], int64, int64)", nogil=True)
def post(state, kind, num_shares):
    """Give a team its next job, of this kind, for that many threads, the caller's among them."""
    _store(_at(state, DONE), 0)
    _post(state, kind, num_shares)


@kernel("void(int64[::1])", nogil=True)
def end(state):
    """Tell that a thread has done its part in Python."""
    _add(_at(state, DONE), 1)


@kernel("void(int64[::1], int64)", nogil=True)
def until_done(state, num_others):
    """Wait until that many threads have done their parts in Python."""
    _until(_at(state, DONE), num_others)


@kernel("void(int64[::1], int64, int64, int64)", nogil=True)
def run(state, function, operand, num_shares):
    """Call the function at this address with a number and the address of COUNTERS, which are 0, on
    at most that many threads, and return when its pieces are done."""
    counters = _at(state, COUNTERS)
    for i in range(_NUM_COUNTERS):
        _store(counters + 64 * i, 0)
    _store(_at(state, FUNCTION), function)
    _store(_at(state, OPERAND), operand)
    _post(state, COMPILED, num_shares)
    call(function, (operand, counters))
    _post(state, OVER, 0)
    _until_all_have_left(state)


@kernel("int64(int64[::1], int64, int64)", nogil=True)
def work(state, share, seen):
    """Take part in compiled jobs after `seen`, until there is one for Python, or the team is
    closed; return that job."""
    while True:
        job = _next(state, seen)
        seen = job
        num_shares = (job >> _SHARES) & ((1 << (_NUMBER - _SHARES)) - 1)
        kind = job & KIND
        if kind == CLOSE or (kind == PYTHON and share < num_shares):
            return job
        if kind == COMPILED and share < num_shares:
            _add(_at(state, ENTERED), 1)
            if _loaded(_at(state, JOB)) == job:
                operand = _loaded(_at(state, OPERAND))
                call(_loaded(_at(state, FUNCTION)), (operand, _at(state, COUNTERS)))
            _add(_at(state, LEFT), 1)


@part
def next_piece(counters, phase):
    """Return the number of a piece of this phase that no thread has taken."""
    return _add(counters + 128 * phase, 1)


@part
def piece_is_done(counters, phase):
    """Tell that a piece of this phase is done."""
    _add(counters + 128 * phase + 64, 1)


@part
def until_all_done(counters, phase, count):
    """Wait until `count` pieces of this phase are done."""
    _until(counters + 128 * phase + 64, count)
