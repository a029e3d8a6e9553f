"""Matches the current iteration with stored expert maps (fMoE), for the policies named map.

Searches are jobs, done in order by the caller or on a thread of their own. A match depends only on
the steps seen before its job was added, so that decisions never depend on which thread is faster.
"""

from dataclasses import dataclass

import numpy as np

from artifacts.errors import BadUsage, Incompatible
from artifacts.routing.expert_maps import ExpertMaps, Trajectories, best_matches, mean_rows
from artifacts.shape import Shape
from artifacts.traces.trace import PREFILL
from runtime.policies.shared.background import BackgroundJob, BackgroundJobs
from runtime.policies.step import Opening, Step


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The stored maps most similar to the R requests of a pass, by its layers up to `layer`; -1: by
    embeddings."""

    layer: int
    scores: np.ndarray  # [R] cosines
    probabilities: np.ndarray  # [R, L, E] float32, of those maps


@dataclass(frozen=True, slots=True, eq=False)
class LearnedMaps:
    """Maps, including the ones that a run added: `newcomers` are their rows, the oldest first,
    `origins` [rows, 2] their request and iteration as the run counted them."""

    maps: ExpertMaps
    newcomers: np.ndarray
    origins: np.ndarray
    num_iterations: int


class Matching:
    """Call `see` with every step, then ask for a `match`.

    With `learns`, iterations are added to the maps when they are complete, before the next pass; a
    full store then replaces the map most similar to the new one.
    """

    def __init__(self, maps: ExpertMaps, shape: Shape, *, learns: bool = False) -> None:
        if (maps.num_layers, maps.num_experts) != (shape.num_layers, shape.num_experts):
            raise Incompatible(
                f"the expert maps have {maps.num_layers} layers of {maps.num_experts} experts, "
                f"the model {shape.num_layers} of {shape.num_experts}: run moectl build-maps on "
                "this model"
            )
        self.learns = learns
        self._maps = maps.copy() if learns else maps
        self._jobs = BackgroundJobs()
        self._answers: list[BackgroundJob] = []  # of this pass: by embedding, then layer by layer
        self._pass_index = -1
        self.layer = -1  # of the step seen last; -1 from the beginning of a pass to its first step
        # Used by jobs only:
        self._under_way: Trajectories | None = None
        self._embedding = np.zeros((0, 0), np.float32)
        self._rows = np.zeros(0, np.int64)
        self._said: list[np.ndarray] = []
        self._request = 0
        self._iteration = -1
        self._num_iterations = 0
        self._origins: dict[int, tuple[int, int]] = {}

    def run_in_background(self) -> None:
        """Do jobs beside the steps from now on, on one thread."""
        self._jobs.run_in_background()

    def close(self) -> None:
        """End the thread, if there is one."""
        self._jobs.close()

    def catch_up(self) -> None:
        """Do now what the thread would do before the next step."""
        self._jobs.catch_up()

    def begin(self, opening: Opening) -> None:
        """Begin a pass: search by its input embeddings. A pass without this call begins with its
        first step."""
        if opening.pass_index != self._pass_index:
            self._pass_index = opening.pass_index
            self.layer = -1
            self._answers = [self._jobs.add(self._begin, opening.embedding, opening.phase)]

    def see(self, step: Step) -> None:
        """Add a step's job. Called twice with the same step it does nothing, because policies share
        a Matching."""
        if (step.pass_index, step.layer) == (self._pass_index, self.layer):
            return
        assert step.embedding is not None and step.last is not None, (
            "a policy that matches maps runs without embeddings"
        )
        self.begin(Opening(step.pass_index, step.phase, step.embedding))
        self.layer = step.layer
        self._answers.append(self._jobs.add(self._go_on, step.layer, step.probabilities, step.last))

    def match(self, lag: int = 0) -> Match | None:
        """Return the match for the step seen last, n: from the steps before n - lag of its pass;
        None if there is none.

        The input embedding counts as known one step before the first layer. Before the first step
        the search by embedding is waited for, whatever the lag.
        """
        at = self.layer - lag if self.layer >= 0 else 0
        return self._jobs.answer(self._answers[at]) if 0 <= at < len(self._answers) else None

    def learned(self) -> LearnedMaps:
        """Return what has been added so far, with the last pass if it is complete."""
        return self._jobs.answer(self._jobs.add(self._learned))

    def receipt(self) -> dict[str, object]:
        """Describe the maps, for the run's receipt."""
        learned = self.learned()
        return {
            "held": len(learned.maps),
            "capacity": learned.maps.capacity,
            "bytes": learned.maps.capacity * learned.maps.map_nbytes,
            "dtype": learned.maps.dtype,
            "learned_iterations": learned.num_iterations if self.learns else None,
        }

    # Jobs

    def _begin(self, embedding: np.ndarray, phase: int) -> Match | None:
        self._learn()
        self._count(phase, len(embedding))
        self._embedding = embedding
        self._said = []
        self._under_way = self._maps.begin(len(embedding))
        return self._best(-1, self._maps.semantic_scores(embedding)) if len(self._maps) else None

    def _go_on(self, layer: int, probabilities: np.ndarray, last: np.ndarray) -> Match | None:
        if layer != len(self._said):  # a pass without one of its layers matches nothing
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
            self._origins.pop(row, None)  # reinsert it last, as the newest
            self._origins[row] = (self._request + number, self._iteration)
        self._num_iterations += len(rows)
        self._said = []

    def _learned(self) -> LearnedMaps:
        self._learn()
        origins = np.array(list(self._origins.values()), np.int64).reshape(-1, 2)
        return LearnedMaps(
            self._maps, np.array(list(self._origins), np.int64), origins, self._num_iterations
        )


@dataclass(frozen=True, slots=True, eq=False)
class Guide:
    """Reads predictions for the layer `distance` ahead from stored maps, by a match `lag` + 1
    layers old.

    At lag 0 `distance` is fMoE's d: the layers before this one guide the layer d ahead. With
    `semantic`, embeddings guide the layers that no trajectory reaches.
    """

    matching: Matching
    distance: int
    lag: int = 0
    semantic: bool = True

    def match(self, step: Step) -> Match | None:
        """Return the match known when this step runs."""
        self.matching.see(step)
        match = self.matching.match(self.lag)
        return match if match is not None and (self.semantic or match.layer >= 0) else None

    def first_match(self, opening: Opening) -> Match | None:
        """Return the match by embedding, before the first step."""
        self.matching.begin(opening)
        return self.matching.match()

    def layers(self, match: Match) -> range:
        """Return the layers that a match guides now: one, or for a match by embedding all that no
        trajectory reaches."""
        now = self.matching.layer
        first = now + (self.distance if match.layer >= 0 else 1)
        return range(first, min(now + self.distance + 1, match.probabilities.shape[1]))

    def predict(self, step: Step) -> tuple[np.ndarray, np.ndarray] | None:
        """Return probabilities [R, E] of layer `step.layer + distance` and the scores [R] of their
        maps; None past the last layer and before the first match."""
        match = self.match(step)
        layer = step.layer + self.distance
        if match is None or layer >= match.probabilities.shape[1]:
            return None
        return match.probabilities[:, layer], match.scores


def check_ahead(name: str, distance: int, lag: int) -> None:
    """Raise BadUsage for an impossible distance or lag."""
    if distance < 1 or lag < 0:
        raise BadUsage(f"{name} needs distance >= 1 and lag >= 0")
