"""SIGKILL at any moment of a command that writes or generates, then the same command once more."""

import random
import signal
from pathlib import Path

from artifacts.store.leftovers import StoreFinding
from moectl.shared.terminal.exit_codes import DONE
from tools.torments.cases import Lost
from tools.torments.victim_commands import drawn
from tools.torments.victims import Death, Victims

_LATER_S = 0.03  # after an event, while the operation that it began is running


class Killed:
    """Complete runs are whole, earlier runs are intact, and the repeated command gives the same
    rows and files.

    Half of the kills are timed by the clock, half by the number of calls that change or read a
    file.
    """

    classes = (1,)
    share = 4.0

    def __init__(self, ground: Path) -> None:
        self._victims = Victims(ground)

    def one(self, rng: random.Random) -> str:
        command, has_runs = drawn(rng)
        times = 1 + (rng.random() < 0.25)  # also killed while it resumes
        folder = self._victims.fresh("killed", has_runs=has_runs)
        num_killed = num_whole = 0
        for _ in range(times):
            ended = self._victims.start(
                command, folder, self._death(rng, command, has_runs=has_runs)
            ).end()
            if ended.code not in (DONE, -signal.SIGKILL):
                raise Lost(f"{command} ended with {ended.code}: {ended.said[-400:]}")
            num_killed += ended.code != DONE
            num_whole = self._victims.check(command, folder, has_runs=has_runs, times=num_whole)
        left = self._victims.finish(command, folder, has_runs=has_runs, times=num_whole)
        if stuck := [finding for finding in left if not _is_of_the_dead(finding)]:
            raise Lost(f"{command} again left {stuck[0]}")
        how = ("done before it was killed", "killed", "killed, and again")[num_killed]
        return f"{command}: {how}" + ", its run complete" * bool(num_whole)

    def _death(self, rng: random.Random, command: str, *, has_runs: bool) -> Death:
        _, undisturbed = self._victims.known(command, has_runs=has_runs)
        if rng.random() < 0.5:
            return Death(rng.uniform(0, undisturbed.seconds))
        later_s = rng.choice((0.0, rng.uniform(0, _LATER_S)))
        return Death(later_s, event=rng.randint(1, undisturbed.events))


def _is_of_the_dead(finding: StoreFinding) -> bool:
    """Return whether this is a temporary file that only its killed writer could have removed, which
    a check reports."""
    return "half written by process" in finding.says
