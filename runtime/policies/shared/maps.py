"""Matches the iteration under way with stored expert maps (fMoE): what the policies named map share.

Searching happens in jobs, in order, by who asks or on a thread of its own. An answer follows from the steps that were
seen before its job and from nothing else: what is decided never depends on which thread was faster.
"""

from dataclasses import dataclass

import numpy as np

from artifacts.errors import BadUsage, Incompatible
from artifacts.routing.expert_maps import ExpertMaps, Trajectories, best_matches, mean_rows
from artifacts.shape import Shape
from artifacts.traces.trace import PREFILL
from runtime.policies.shared.background import BackgroundJob, BackgroundJobs
from runtime.policies.step import Step


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The stored maps most like the R requests of a pass, by its layers up to `layer`; -1: by their embeddings."""

    layer: int
    scores: np.ndarray  # [R] cosines
    probabilities: np.ndarray  # [R, L, E] float32, what those maps say


@dataclass(frozen=True, slots=True, eq=False)
class LearnedMaps:
    """Maps with what a run has added: `newcomers` are the rows that hold something new, oldest first, `origins`
    [rows, 2] their request and iteration as the run counted them."""

    maps: ExpertMaps
    newcomers: np.ndarray
    origins: np.ndarray
    num_iterations: int


class Matching:
    """`see` every step, then ask for a `match`. `learns`: iterations join the maps when they are whole, that is before
    the next pass; a full store then gives up the map most like the newcomer."""

    def __init__(self, maps: ExpertMaps, shape: Shape, *, learns: bool = False) -> None:
        if (maps.num_layers, maps.num_experts) != (shape.num_layers, shape.num_experts):
            raise Incompatible(
                f"the expert maps have {maps.num_layers} layers of {maps.num_experts} experts, the model "
                f"{shape.num_layers} of {shape.num_experts}: run moectl build-maps on this model"
            )
        self.learns = learns
        self._maps = maps.copy() if learns else maps
        self._jobs = BackgroundJobs()
        self._answers: list[BackgroundJob] = []  # of this pass: by embedding, then layer by layer
        self._before: list[BackgroundJob] = []  # of the pass before
        self._pass_index = self._layer = -1
        # What follows belongs to the jobs.
        self._under_way: Trajectories | None = None
        self._embedding, self._rows = np.zeros((0, 0), np.float32), np.zeros(0, np.int64)
        self._said: list[np.ndarray] = []
        self._request, self._iteration, self._num_iterations = 0, -1, 0
        self._origins: dict[int, tuple[int, int]] = {}

    def run_in_background(self) -> None:
        """From here on jobs run beside the steps, on one thread."""
        self._jobs.run_in_background()

    def close(self) -> None:
        """End the thread, if there is one."""
        self._jobs.close()

    def catch_up(self) -> None:
        """Do now what the thread would have done by the next step."""
        self._jobs.catch_up()

    def begin(self, pass_index: int, phase: int, embedding: np.ndarray) -> None:
        """A pass has been given its tokens: search by `embedding` [R, H]. Where nobody says so, its first step does."""
        if pass_index != self._pass_index:
            self._pass_index, self._layer = pass_index, -1
            is_whole = len(self._answers) == self._maps.num_layers + 1 and not any(job.error for job in self._answers)
            self._before, self._answers = self._answers if is_whole else [], []
            self._answers.append(self._jobs.add(self._begin, embedding, phase))

    def see(self, step: Step) -> None:
        """A step has begun, its router has spoken. The same step twice is once: policies share a Matching."""
        if (step.pass_index, step.layer) == (self._pass_index, self._layer):
            return
        assert step.embedding is not None and step.last is not None, (
            "a policy that matches maps runs without embeddings"
        )
        self.begin(step.pass_index, step.phase, step.embedding)
        self._layer = step.layer
        self._answers.append(self._jobs.add(self._go_on, step.layer, step.probabilities, step.last))

    def match(self, lag: int = 0) -> Match | None:
        """For the step seen last, n: the answer from the steps before n - lag of its pass; None if there is none.

        What the pass was given counts as known one step before its first layer.
        """
        return self._answer(self._answers, self._layer - lag) if self._layer >= lag else None

    def latest(self, lag: int = 0) -> Match | None:
        """As `match`, in the first steps of a pass the one from the pass before."""
        at = self._layer - lag
        return self._answer(self._answers, at) if at >= 0 else self._answer(self._before, at)

    def learned(self) -> LearnedMaps:
        """What has been added so far, the last pass too if it is whole."""
        return self._jobs.answer(self._jobs.add(self._learned))

    def receipt(self) -> dict[str, object]:
        """What is matched with, and how it goes on."""
        learned = self.learned()
        return {
            "held": len(learned.maps),
            "capacity": learned.maps.capacity,
            "bytes": learned.maps.capacity * learned.maps.map_nbytes,
            "dtype": learned.maps.dtype,
            "learned_iterations": learned.num_iterations if self.learns else None,
        }

    def _answer(self, answers: list[BackgroundJob], at: int) -> Match | None:
        return self._jobs.answer(answers[at]) if -len(answers) <= at < len(answers) else None

    # Jobs

    def _begin(self, embedding: np.ndarray, phase: int) -> Match | None:
        self._learn()
        self._count(phase, len(embedding))
        self._embedding, self._said = embedding, []
        self._under_way = self._maps.begin(len(embedding))
        return self._best(-1, self._maps.semantic_scores(embedding)) if len(self._maps) else None

    def _go_on(self, layer: int, probabilities: np.ndarray, last: np.ndarray) -> Match | None:
        if layer != len(self._said):  # a pass that lacks a layer is like nothing
            self._said = []
            return None
        self._said.append(mean_rows(probabilities, last))
        self._under_way.update(self._said[-1])
        return self._best(layer, self._under_way.scores()) if len(self._maps) else None

    def _best(self, layer: int, scores: np.ndarray) -> Match:
        rows, best = best_matches(scores)
        return Match(layer, best, self._maps.rows(rows))

    def _count(self, phase: int, num_requests: int) -> None:
        self._iteration = 0 if phase == PREFILL else self._iteration + 1
        if phase == PREFILL:
            self._request += len(self._embedding)

    def _learn(self) -> None:
        if not self.learns or len(self._said) < self._maps.num_layers:
            return
        rows = self._maps.add(self._embedding, np.stack(self._said, axis=1)).tolist()
        for number, row in enumerate(rows):
            self._origins.pop(row, None)  # the newest of all comes last
            self._origins[row] = (self._request + number, self._iteration)
        self._num_iterations += len(rows)
        self._said = []

    def _learned(self) -> LearnedMaps:
        self._learn()
        origins = np.array(list(self._origins.values()), np.int64).reshape(-1, 2)
        return LearnedMaps(self._maps, np.array(list(self._origins), np.int64), origins, self._num_iterations)


@dataclass(frozen=True, slots=True, eq=False)
class Guide:
    """Says what stored maps make of a layer to come: the layer `distance` from now, from a match `lag` + 1 layers old.

    fMoE's d is then distance + lag + 1: trajectories guide layers from d on, embeddings those before, if `semantic`.
    """

    matching: Matching
    distance: int
    lag: int = 0
    semantic: bool = True

    def match(self, step: Step) -> Match | None:
        """What is known when this step runs."""
        self.matching.see(step)
        found = self.matching.match(self.lag)
        return found if found is not None and (self.semantic or found.layer >= 0) else None

    def layers(self, step: Step, match: Match) -> range:
        """The layers that a match guides: one, or by the embedding all that no trajectory will reach."""
        first = step.layer + (self.distance if match.layer >= 0 else 1)
        return range(first, min(step.layer + self.distance + 1, match.probabilities.shape[1]))

    def predict(self, step: Step) -> tuple[np.ndarray, np.ndarray] | None:
        """Probabilities [R, E] of layer `step.layer + distance` and the scores [R] of the maps that say so; None past
        the last layer, and where nothing is matched yet."""
        match, layer = self.match(step), step.layer + self.distance
        if match is None or layer >= match.probabilities.shape[1]:
            return None
        return match.probabilities[:, layer], match.scores


def check_ahead(name: str, distance: int, lag: int) -> None:
    """Raise BadUsage for a distance or a lag that cannot be."""
    if distance < 1 or lag < 0:
        raise BadUsage(f"{name} needs distance >= 1 and lag >= 0")
