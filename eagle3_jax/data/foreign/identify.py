"""What is a stored state? Guessed from its numbers, or measured against the target.

Without the target: an embedding depends on the token alone, so equal tokens have equal vectors; the output of an
RMSNorm y = w * x / rms(x) lies on one surface, sum_i a_i y_i^2 = const with a = 1 / w^2, for all tokens; what is left
grows with depth. With the target: its own states on the same tokens are compared with each stored one.
"""

import functools
from dataclasses import dataclass

import jax
import numpy as np

from eagle3_jax.data.foreign.sample import Sample
from eagle3_jax.data.foreign.wiring import StateMap
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target
from eagle3_jax.models.weights import Graph, Params
from eagle3_jax.taps import TapSet, WiringError

_TOKENS = 64  # causal: the first tokens of a document do not need the rest
ALIEN = 0.5  # a state further than this from every state of the target is another target's


@dataclass(frozen=True)
class Looks:
    """Statistics of one state over tokens and what they suggest.

    rms: median over tokens of the root mean square of a vector; spread: interquartile range over median of the same;
    peak: largest over median (attention sinks: large in the middle of a deep model); like: `embedding`, `early`,
    `middle`, `late`, `post-norm`, or `un-normed` where one state has no other to be ranked against; certain: it follows
    from a property that no other state has.
    """

    rms: float
    spread: float
    peak: float
    like: str
    certain: bool


def looks(states: list[np.ndarray], input_ids: np.ndarray) -> list[Looks]:
    """Judges states float [T, H] of the same tokens int [T], in the file's order.

    Depth is by rank of the norms among these states. Only the last state is guessed to be post-norm where there are too
    few tokens to be certain: its norms are even and below those of a state before it.
    """
    sizes = [np.sqrt(np.mean(np.square(np.asarray(state, np.float32)), axis=-1)) for state in states]
    numbers = []
    for size in sizes:
        low, middle, high = (float(value) for value in np.percentile(size, (25, 50, 75)))
        middle = max(middle, 1e-30)
        numbers.append((middle, (high - low) / middle, float(size.max()) / middle))
    kinds: list[tuple[str, bool] | None] = []
    for state in states:
        state = np.asarray(state, np.float32)
        alone, normed = _depends_on_token_alone(state, input_ids), _is_normed(state)
        kinds.append(("embedding", True) if alone else ("post-norm", True) if normed else None)
    largest = max((rms for rms, *_ in numbers[:-1]), default=0.0)
    rms, spread, peak = numbers[-1]
    if kinds[-1] is None and not _enough(states[-1]) and rms < largest and spread < 0.2 and peak < 2:
        kinds[-1] = ("post-norm", False)
    rest = sorted((i for i, kind in enumerate(kinds) if kind is None), key=lambda i: numbers[i][0])
    for rank, i in enumerate(rest):
        share = rank / max(len(rest) - 1, 1)
        kinds[i] = ("early" if share < 0.3 else "middle" if share < 0.6 else "late", False)
    if len(rest) == 1:
        kinds[rest[0]] = ("un-normed", False)  # nothing to rank it against
    return [Looks(*number, *kind) for number, kind in zip(numbers, kinds, strict=True)]


def _depends_on_token_alone(state: np.ndarray, input_ids: np.ndarray) -> bool:
    """Equal tokens, equal vectors; False where no token comes twice."""
    _, first, inverse = np.unique(input_ids, return_index=True, return_inverse=True)
    again = first[inverse] != np.arange(len(input_ids))
    if not again.any():
        return False
    earlier = state[first[inverse]][again]
    return bool(np.linalg.norm(state[again] - earlier) <= 1e-3 * np.linalg.norm(earlier))


def tokens_needed(hidden_size: int) -> int:
    """From how many tokens on the output of a norm is recognised for certain."""
    return 3 * hidden_size // 2


def _enough(state: np.ndarray) -> bool:
    return len(state) >= tokens_needed(state.shape[1])


def _is_normed(state: np.ndarray) -> bool:
    """Whether the squares of all tokens lie on one surface; False where there are too few tokens to tell."""
    if not _enough(state):
        return False
    state = state[: tokens_needed(state.shape[1])].astype(np.float64)
    squares = np.square(state / np.sqrt(np.mean(np.square(state))))
    gram = squares.T @ squares
    gram += 1e-9 * np.trace(gram) / len(gram) * np.eye(len(gram))
    weights = np.linalg.solve(gram, squares.sum(axis=0))
    left = np.sum(np.square(squares @ weights - 1)) / (len(squares) - len(gram))
    return bool(left < 1e-4)  # relative deviation under 1 %; other states leave 10 % and more


@dataclass(frozen=True)
class Measured:
    """The point of the target nearest to a stored state. distance: median over tokens of the relative distance to it;
    second: the same for the second nearest point."""

    point: int
    normed: bool
    distance: float
    second: float

    def words(self, num_layers: int) -> str:
        return "last block output after the final norm" if self.normed else TapSet([self.point]).words(num_layers)[1:-1]


def distances(sample: Sample, target: Target) -> np.ndarray:
    """Relative distances [states, N+2] of stored states to the target's taps 0..N and to its normed last state.

    One forward of the target over the first tokens of the document; medians over tokens, so that a sink with its huge
    norm does not decide. Raises UserError for another hidden size or tokens outside the vocabulary.
    """
    check_fits(sample, target)
    ids = np.zeros((1, _TOKENS), np.int32)
    count = min(len(sample.input_ids), _TOKENS)
    ids[0, :count] = sample.input_ids[:count]
    out = target.forward(ids, taps=range(target.num_layers + 1), lengths=[count])
    normed = _normed(target.graph, target.params, out.last_hidden)
    own = np.stack([np.asarray(jax.device_get(a), np.float32)[0, :count] for a in (*out.taps.arrays, normed)])
    stored = np.stack([np.asarray(state[:count], np.float32) for state in sample.states()])
    lengths = np.maximum(np.linalg.norm(own, axis=-1), 1e-30)
    return np.stack([np.median(np.linalg.norm(state - own, axis=-1) / lengths, axis=-1) for state in stored])


def measure(sample: Sample, target: Target) -> list[Measured]:
    """Which point of the target each stored state is nearest to."""
    found = []
    for row in distances(sample, target):
        nearest, second = np.argsort(row)[:2]
        last = target.num_layers
        found.append(Measured(min(int(nearest), last), int(nearest) > last, float(row[nearest]), float(row[second])))
    return found


def verify(sample: Sample, states: StateMap, target: Target) -> None:
    """Holds what was said about the states against the target itself.

    Raises WiringError, naming state and points, if another point is clearly nearer than the one said, and UserError if
    no point is near: the features are another target's.
    """
    for i, (name, row) in enumerate(zip(sample.state_names, distances(sample, target), strict=True)):
        last = target.num_layers
        said = last + 1 if states.normed and i == states.teacher else states.points[i]
        nearest = int(np.argmin(row))
        if row[nearest] > ALIEN:
            raise UserError(
                f"{name} is like no state of this target (relative distance {row[nearest]:.2f} at best) / "
                f"{sample.path} / were the features made with {target.path}?"
            )
        if row[said] > 1.5 * row[nearest] + 1e-3:
            words = [
                Measured(min(p, last), p > last, 0.0, 0.0).words(last) + f" (distance {row[p]:.3f})"
                for p in (said, nearest)
            ]
            raise WiringError(
                f"{name} was said to be {words[0]}, but is {words[1]} / {sample.path} / correct data.stored.ids, "
                "convention or last_hidden"
            )


def check_fits(sample: Sample, target: Target) -> None:
    """Raises UserError where width or tokens show that the sample was made with another target."""
    if sample.hidden_size != target.config.hidden_size:
        raise UserError(
            f"states are {sample.hidden_size} wide, the target {target.config.hidden_size} / {sample.path} / were the "
            f"features made with {target.path}?"
        )
    outside = sample.input_ids[(sample.input_ids < 0) | (sample.input_ids >= target.config.vocab_size)]
    if outside.size:
        raise UserError(
            f"token id {outside[0]} is outside 0..{target.config.vocab_size - 1} / {sample.path} / were the features "
            f"made with {target.path}?"
        )


@functools.partial(jax.jit, static_argnums=0)
def _normed(graph: Graph, params: Params, last: jax.Array) -> jax.Array:
    return graph.merge(params).model.norm(last)
