"""Expert maps (fMoE): the routers' distributions of earlier iterations, matched to guess the
distributions of a similar one.

An iteration is one request's share of a pass: its prompt, or one token. Its map is the mean of
every router's distribution over the iteration's tokens, [L, E]. A map is found by the mean of its
tokens' input embeddings, [H]; only the direction of an embedding counts, so embeddings are kept at
unit length.

Shapes: N maps held of at most C, R requests, B newcomers, T tokens, L layers, E experts, H hidden.
"""

import numpy as np

from artifacts.common.suggestions import unknown
from artifacts.errors import BadInput, BadUsage, OutOfResources

DTYPES = ("float32", "float16")
# the defaults of `moectl build-maps` too
CAPACITY = 1000
DISTANCE = 3
_TINY = np.float32(1e-30)
_CHUNK = 1024  # maps widened from float16 at a time
# similarities between newcomers and maps computed at a time
_BLOCK_NBYTES = 16 << 20
_MOST_NEWCOMERS = 512


def select_experts(probabilities: np.ndarray, score: float, k: int) -> list[int]:
    """The most probable experts of `probabilities` [E] until their sum reaches delta = clip(1 -
    score, 0, 1), at least k of them, most probable first, equals by the lower id. A worse match
    thus selects more experts."""
    probabilities = np.asarray(probabilities, np.float64)
    order = (-probabilities).argsort(kind="stable")
    delta = min(max(1.0 - float(score), 0.0), 1.0)
    reached = int(probabilities[order].cumsum().searchsorted(delta)) + 1
    return order[: max(reached, k)].tolist()


def priorities(probabilities: np.ndarray, num_ahead: int) -> np.ndarray:
    """p / (l - l_now): how urgent the experts of a layer are that runs `num_ahead` layers from now.
    Before the first layer has run, layer l is l + 1 ahead."""
    assert num_ahead >= 1, num_ahead
    return probabilities / num_ahead


def mean_rows(values: np.ndarray, last: np.ndarray) -> np.ndarray:
    """[R, *] float32: means of consecutive groups of rows of `values` [T, *]; `last` [R] holds the
    last row of each group."""
    if len(last) == len(values):
        return values.astype(np.float32, copy=False)
    starts = np.append(0, last[:-1] + 1)
    sums = np.add.reduceat(values, starts, axis=0, dtype=np.float64)
    return (sums / np.diff(last, prepend=-1)[:, None]).astype(np.float32)


def best_matches(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each row of `scores` [R, N] the best map, equals by the lower number, and its
    score: [R] and [R]."""
    rows = scores.argmax(axis=1)
    return rows, scores[np.arange(len(rows)), rows]


def map_nbytes(num_layers: int, num_experts: int, hidden: int, dtype: str = "float32") -> int:
    """Bytes of one map: embedding and distributions in `dtype`, and one float32 per layer for the
    prefix lengths."""
    return (hidden + num_layers * num_experts) * np.dtype(dtype).itemsize + num_layers * 4


class ExpertMaps:
    """At most C maps as two arrays. `distance` d is how many layers ahead a match guides:
    embeddings guide the first d layers, and after layer l the distributions of layers 0..l guide
    layer l + d.

    `version` changes whenever the maps do. float16 halves the memory but makes matching slower, as
    numpy has to widen it.
    """

    def __init__(
        self,
        capacity: int,
        *,
        num_layers: int,
        num_experts: int,
        hidden: int,
        distance: int = DISTANCE,
        dtype: str = DTYPES[0],
    ) -> None:
        if dtype not in DTYPES:
            raise BadUsage(unknown("dtype", dtype, DTYPES))
        if capacity < 1:
            raise BadUsage(f"a store of maps needs a capacity of at least 1, not {capacity}")
        if not 1 <= distance <= num_layers:
            raise BadUsage(
                f"the distance must be 1 to {num_layers}, the model's MoE layers, not {distance}"
            )
        self.capacity = capacity
        self.distance = distance
        self.num_replaced = self.version = self._size = 0
        self.map_nbytes = map_nbytes(num_layers, num_experts, hidden, dtype)
        try:
            self._embeddings = np.empty((capacity, hidden), dtype)
            # Matching reads one layer of all maps at a time, and other work has emptied the CPU
            # caches since.
            self._by_layer = np.empty((num_layers, capacity, num_experts), dtype)
            # 1 / length of each prefix
            self._inverse = np.empty((num_layers, capacity), np.float32)
        except (MemoryError, ValueError) as error:
            nbytes = capacity * self.map_nbytes
            raise OutOfResources(
                f"{capacity} maps take {nbytes:,} bytes: give a smaller capacity"
            ) from error

    @classmethod
    def empty(cls, *, num_layers: int, num_experts: int, hidden: int) -> "ExpertMaps":
        """A store without maps yet, for maps that are learned during a run."""
        sizes = {"num_layers": num_layers, "num_experts": num_experts, "hidden": hidden}
        return cls(CAPACITY, **sizes, distance=min(DISTANCE, num_layers))

    @classmethod
    def of(
        cls,
        embeddings: np.ndarray,
        probabilities: np.ndarray,
        *,
        distance: int = DISTANCE,
        capacity: int | None = None,
    ) -> "ExpertMaps":
        """A store of these maps, arrays as the properties `embeddings` and `probabilities` return
        them; it is full unless `capacity` is larger."""
        maps = cls(
            max(capacity or 0, len(embeddings)),
            num_layers=probabilities.shape[1],
            num_experts=probabilities.shape[2],
            hidden=embeddings.shape[1],
            distance=distance,
            dtype=str(embeddings.dtype),
        )
        maps._size = len(embeddings)
        maps._write(np.arange(len(embeddings)), embeddings, probabilities)
        return maps

    def __len__(self) -> int:
        return self._size

    def copy(self) -> "ExpertMaps":
        """Another store of the same maps and capacity."""
        return ExpertMaps.of(
            self.embeddings, self.probabilities, distance=self.distance, capacity=self.capacity
        )

    @property
    def embeddings(self) -> np.ndarray:
        """[N, H], of unit length."""
        return self._embeddings[: self._size]

    @property
    def probabilities(self) -> np.ndarray:
        """[N, L, E], a view of arrays that are stored layer by layer."""
        return self._by_layer[:, : self._size].transpose(1, 0, 2)

    @property
    def num_layers(self) -> int:
        return len(self._by_layer)

    @property
    def num_experts(self) -> int:
        return self._by_layer.shape[2]

    @property
    def hidden(self) -> int:
        return self._embeddings.shape[1]

    @property
    def dtype(self) -> str:
        return str(self._embeddings.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the maps held."""
        return self._size * self.map_nbytes

    def layer(self, rows: np.ndarray, layer: int) -> np.ndarray:
        """[R, E] float32: the distributions of one layer in the maps numbered `rows` [R]."""
        return self._by_layer[layer, rows].astype(np.float32, copy=False)

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """[R, L, E] float32: a copy of all distributions in the maps numbered `rows` [R]."""
        return self._by_layer[:, rows].transpose(1, 0, 2).astype(np.float32)

    def semantic_scores(self, embeddings: np.ndarray) -> np.ndarray:
        """Return [R, N] cosines of `embeddings` [R, H] with the embeddings of the maps; 0 for a
        vector of length 0."""
        return np.clip(_dots(_unit(embeddings), self.embeddings), -1, 1)

    def trajectory_scores(self, prefixes: np.ndarray) -> np.ndarray:
        """[R, N] cosines of the distributions `prefixes` [R, l, E] of the first l layers,
        flattened, with the maps'."""
        under_way = self.begin(len(prefixes))
        for layer in range(prefixes.shape[1]):
            under_way.update(prefixes[:, layer])
        return under_way.scores()

    def begin(self, num_requests: int) -> "Trajectories":
        """The trajectories of a new pass's requests, before its first layer."""
        return Trajectories(self, num_requests)

    def add(self, embeddings: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        """Add maps [B, H] and [B, L, E] one after another; return the number that each got, [B].

        In a full store a newcomer replaces the map most similar to it: d/L semantic + (L-d)/L
        trajectory score, equals by the lower number. Raises BadInput for values that are not
        finite.
        """
        if not (np.isfinite(embeddings).all() and np.isfinite(probabilities).all()):
            raise BadInput(
                "an embedding or a router's distribution is not finite: is the checkpoint damaged?"
            )
        embeddings = _unit(embeddings).astype(self.dtype)
        probabilities = probabilities.astype(self.dtype, copy=False)
        room = min(len(embeddings), self.capacity - self._size)
        rows = [np.arange(self._size, self._size + room)]
        self._write(rows[0], embeddings[:room], probabilities[:room])
        self._size += room
        step = max(1, min(_MOST_NEWCOMERS, _BLOCK_NBYTES // (4 * self.capacity)))
        for start in range(room, len(embeddings), step):
            block = slice(start, start + step)
            rows.append(self._replace(embeddings[block], probabilities[block]))
        self.version += 1
        return np.concatenate(rows)

    def _replace(self, embeddings: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        """Replace maps as if newcomers came one after another, with all similarities computed at
        once: a newcomer's column takes the place of the column of the map that it replaces."""
        similar = self._similarity(embeddings, probabilities, self)
        among = self._similarity(
            embeddings, probabilities, ExpertMaps.of(embeddings, probabilities, distance=1)
        )
        rows = np.empty(len(embeddings), np.int64)
        for newcomer, scores in enumerate(similar):
            rows[newcomer] = row = scores.argmax()
            similar[newcomer + 1 :, row] = among[newcomer + 1 :, newcomer]
        # Where several newcomers share a place, the last one stays.
        places, at = np.unique(rows[::-1], return_index=True)
        kept = len(rows) - 1 - at
        self._write(places, embeddings[kept], probabilities[kept])
        self.num_replaced += len(rows)
        return rows

    def _similarity(
        self, embeddings: np.ndarray, probabilities: np.ndarray, others: "ExpertMaps"
    ) -> np.ndarray:
        """[B, N] d/L semantic + (L-d)/L trajectory scores, with this store's d."""
        share = self.distance / self.num_layers
        semantic = others.semantic_scores(embeddings.astype(np.float32, copy=False))
        return share * semantic + (1 - share) * others.trajectory_scores(
            probabilities.astype(np.float32, copy=False)
        )

    def _write(self, rows: np.ndarray, embeddings: np.ndarray, probabilities: np.ndarray) -> None:
        by_layer = probabilities.transpose(1, 0, 2)
        self._embeddings[rows] = embeddings
        self._by_layer[:, rows] = by_layer
        squares = by_layer.astype(np.float32, copy=False)
        self._inverse[:, rows] = _inverse(np.vecdot(squares, squares).cumsum(axis=0))


class Trajectories:
    """R requests in one pass, matched layer by layer: each layer costs its own [N, E], however many
    went before.

    The maps must not change during the pass: add maps between passes.
    """

    def __init__(self, maps: ExpertMaps, num_requests: int) -> None:
        self.num_layers = 0
        self._maps = maps
        self._version = maps.version
        self._dots = np.zeros((num_requests, len(maps)), np.float32)
        self._squares = np.zeros(num_requests, np.float32)

    def update(self, probabilities: np.ndarray) -> None:
        """Add the next layer's distributions [R, E] float32, each the mean over the request's
        tokens."""
        assert self._version == self._maps.version, "maps were added in the middle of a pass"
        self._dots += _dots(probabilities, self._maps._by_layer[self.num_layers, : len(self._maps)])
        self._squares += np.vecdot(probabilities, probabilities)
        self.num_layers += 1

    def scores(self) -> np.ndarray:
        """[R, N] cosines over the layers so far."""
        assert self.num_layers, "no layer has run yet: the embedding guides the first layers"
        scores = self._dots * self._maps._inverse[self.num_layers - 1, : len(self._maps)]
        scores *= _inverse(self._squares)[:, None]
        # distributions are not negative, nor are products of them
        return np.minimum(scores, 1, out=scores)


def _dots(queries: np.ndarray, held: np.ndarray) -> np.ndarray:
    """[R, N] float32 products of `queries` [R, X] float32 with `held` [N, X] of either dtype."""
    if held.dtype == np.float32:
        return queries @ held.T
    products = np.empty((len(queries), len(held)), np.float32)
    for start in range(0, len(held), _CHUNK):
        part = slice(start, start + _CHUNK)
        np.matmul(queries, held[part].astype(np.float32).T, out=products[:, part])
    return products


def _unit(vectors: np.ndarray) -> np.ndarray:
    """[R, X] float32 of length 1, or 0."""
    vectors = vectors.astype(np.float32, copy=False)
    return vectors * _inverse(np.vecdot(vectors, vectors))[:, None]


def _inverse(squares: np.ndarray) -> np.ndarray:
    """1 / length, from its square; any finite number for length 0, as it multiplies zeros."""
    return 1 / np.sqrt(np.maximum(squares, _TINY))
