"""Accuracy of a draft under one wiring: the training graph, teacher-forced, against the target's choice.

One compiled function serves all tap choices of a network, since the taps are a gather from the stack of states.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.doctor.states import States
from eagle3_jax.doctor.wiring import MAPS, TEACHERS, Wiring
from eagle3_jax.draft.config import DraftConfig
from eagle3_jax.draft.draft import Draft, draft_graph
from eagle3_jax.draft.ttt import document_positions, shift, ttt_forward
from eagle3_jax.models.rope import RopeConfig
from eagle3_jax.models.weights import Graph, Params
from eagle3_jax.taps import Taps, TapSet
from eagle3_jax.training.loss import supervised
from eagle3_jax.training.step import Batch

DEPTH = 4
_PIECE = 16  # slots of a cluster where documents are too few or too unequal; also the fewest clusters
_FLOOR = -15.0  # nats: what a choice outside the draft vocabulary, or a hopeless one, costs at most


@dataclass(frozen=True, eq=False)
class Measured:
    """One wiring on all slots measured. right: bool [S, n], all tokens up to that depth right; counted: bool [S, n].

    cluster: int [n], slots that are not independent of each other. log_likelihood: of the target's choice, depth 1.
    """

    wiring: Wiring
    right: np.ndarray
    counted: np.ndarray
    cluster: np.ndarray
    log_likelihood: float

    @property
    def accuracy(self) -> list[float]:
        """Full acceptance by depth: share of slots whose first d tokens are all right."""
        return [float(r.sum() / max(c.sum(), 1)) for r, c in zip(self.right, self.counted, strict=True)]

    @property
    def error(self) -> list[float]:
        """Standard error of each accuracy, slots of a cluster taken together."""
        pairs = zip(self.right, self.counted, self.accuracy, strict=True)
        residual = [(np.where(c, r - a, 0.0), c) for r, c, a in pairs]
        return [math.sqrt(float((self._sums(d) ** 2).sum())) / max(int(c.sum()), 1) for d, c in residual]

    @property
    def accepted(self) -> np.ndarray:
        """Draft tokens accepted from each slot [n]: what the wirings are ranked by."""
        return self.right.sum(0)

    @property
    def tokens(self) -> float:
        """Tokens a round, averaged over slots (`slot_tau`)."""
        return 1.0 + sum(self.accuracy)

    def above(self, other: "Measured") -> float:
        """By how many standard errors this accepts more than `other` on the same slots; 0 where they agree.

        Sum of the paired differences over the root of the sum of squared cluster sums. It never exceeds the root of
        the number of clusters, so few slots decide nothing.
        """
        sums = self._sums((self.accepted - other.accepted).astype(float))
        spread = math.sqrt(float((sums**2).sum()))
        return float(sums.sum()) / spread if spread else 0.0

    def _sums(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.cluster, weights=values)


class Measurer:
    """Measures wirings of one draft on batches whose target states are known, in float32 whatever the draft's dtype:
    many processors have no fast bf16, and the draft is small.
    """

    def __init__(self, stored: Draft, maps: dict[str, np.ndarray], vocab_size: int):
        params = jax.tree.map(lambda p: p.astype(jnp.float32), stored.params)
        self.stored = dataclasses.replace(stored, params=params)
        self.names = [name for name in MAPS if name in maps]
        unused = np.full(stored.config.draft_vocab_size, -1, np.int32)  # one shape however many readings there are
        every = [maps[name] for name in self.names] + [unused] * (len(MAPS) - len(self.names))
        self.maps = jnp.asarray(np.stack(every))
        self.inverse = jnp.asarray(np.stack([_inverse(absolute, vocab_size) for absolute in every]))
        self.networks: dict[DraftConfig, tuple[Graph, Params]] = {}

    def measure(self, wirings: list[Wiring], states: list[States], parts: list[Batch], steps: int) -> list[Measured]:
        """Each wiring together with all readings of d2t and all teachers: they cost nothing more.

        wirings differ in taps or network; their own reading and teacher are ignored.
        """
        slots = slots_of(parts, steps)
        return [m for wiring in wirings for m in self._readings(wiring, states, parts, slots, steps)]

    def _readings(
        self, wiring: Wiring, states: list[States], parts: list[Batch], slots: "Slots", steps: int
    ) -> list[Measured]:
        graph, params = self._network(wiring.config, steps)
        theta = jnp.float32(wiring.config.decoder.rope.theta)
        last = states[0].stack.shape[0] - 1
        rows = jnp.asarray([last if wiring.last_normed and p == last - 1 else p for p in wiring.taps])
        outcomes = [
            _draft_steps(graph, steps, params, theta, self.maps, self.inverse, state, batch, rows)
            for state, batch in zip(states, parts, strict=True)
        ]
        hits, logs = (
            np.concatenate([np.asarray(o[i])[..., c] for o, c in zip(outcomes, slots.chosen, strict=True)], axis=-1)
            for i in (0, 1)
        )
        right = np.logical_and.accumulate(hits & slots.counted, axis=2)
        likelihood = logs.mean(axis=-1)
        return [
            Measured(
                dataclasses.replace(wiring, d2t=d2t, teacher=teacher),
                right[i, k],
                slots.counted,
                slots.cluster,
                float(likelihood[i, k]),
            )
            for i, d2t in enumerate(self.names)
            for k, teacher in enumerate(TEACHERS)
        ]

    def _network(self, config: DraftConfig, steps: int) -> tuple[Graph, Params]:
        """One network, compiled once, for all taps, and for all thetas where theta is a mere number.

        Its own "taps" are the places 0, 1, ... in fc that `rows` fills; one step does not see what is fed back.
        """
        rope, taps = config.decoder.rope, TapSet(range(len(config.taps)))
        if _theta_is_a_number(rope):
            rope = dataclasses.replace(rope, theta=0.0)
        decoder = dataclasses.replace(config.decoder, rope=rope)
        fed_back = config.norm_output and steps > 1
        config = dataclasses.replace(config, taps=taps, decoder=decoder, norm_output=fed_back)
        if config not in self.networks:
            graph, _ = draft_graph(config)
            self.networks[config] = graph, norm_weights(self.stored, config)
        return self.networks[config]


@dataclass(frozen=True)
class _TracedRope(RopeConfig):
    """A rotation whose theta is an array, inside a trace."""

    theta: Float[Array, ""]


def _theta_is_a_number(rope: RopeConfig) -> bool:
    return rope.kind != "yarn"  # whose range of dimensions follows from theta while tracing


def norm_weights(stored: Draft, config: DraftConfig) -> Params:
    """Parameters for the network of `config`: norms before fc dropped, joined or split, all others as stored."""
    params = {k: v for k, v in stored.params.items() if k not in ("input_norm", "fc_norm")}
    if not (config.norm_before_fc or config.fc_norm):
        return params
    if stored.config.norm_before_fc:
        joined = stored.params["input_norm"]["weight"]
    else:
        joined = jnp.concatenate([stored.params["fc_norm"][i]["weight"] for i in range(len(config.taps))])
    if config.norm_before_fc:
        return {**params, "input_norm": {"weight": joined}}
    each = jnp.split(joined, len(config.taps))
    return {**params, "fc_norm": {i: {"weight": weight} for i, weight in enumerate(each)}}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draft_steps(
    graph: Graph,
    steps: int,
    params: Params,
    theta: Float[Array, ""],
    maps: Int[Array, "readings Vd"],
    inverse: Int[Array, "readings V"],
    states: States,
    batch: Batch,
    rows: Int[Array, "A"],
) -> tuple[Bool[Array, "readings teachers S B slots"], Float[Array, "readings teachers B slots"]]:
    """Hits of each step, and the log likelihood of the teacher's choice at the first, for every reading and teacher."""
    model = graph.merge(params)
    decoder = model.config.decoder
    if _theta_is_a_number(decoder.rope):
        rope = _TracedRope(**{**vars(decoder.rope), "theta": theta})
        model.config = dataclasses.replace(model.config, decoder=dataclasses.replace(decoder, rope=rope))
    places: TapSet = model.config.taps
    taps = Taps([states.stack[rows[i]].astype(jnp.float32) for i in places], places)
    positions = document_positions(batch.document_ids)
    logits = ttt_forward(model, taps, batch.ids, positions, batch.document_ids, steps)

    logs = jax.nn.log_softmax(logits[0], axis=-1)

    def hits(choice, step):
        ids = jnp.argmax(logits[step], axis=-1)
        return jax.vmap(lambda absolute: absolute[ids])(maps) == shift(choice, 1 + step, -1)[:, :-1]

    def likelihood(choice):
        wanted = jax.vmap(lambda ids: ids[shift(choice, 1, 0)[:, :-1]])(inverse)
        own = jax.vmap(lambda ids: jnp.take_along_axis(logs, jnp.maximum(ids, 0)[..., None], axis=-1)[..., 0])(wanted)
        return jnp.where(wanted < 0, _FLOOR, jnp.maximum(own, _FLOOR))

    every = range(states.choices.shape[0])
    right = jnp.stack([jnp.stack([hits(states.choices[k], s) for s in range(steps)], axis=1) for k in every], axis=1)
    return right, jnp.stack([likelihood(states.choices[k]) for k in every], axis=1)


@dataclass(frozen=True)
class Slots:
    """chosen: bool [B, slots] a batch, those supervised at depth 1, n in all. counted: bool [S, n], whether a slot
    counts at each depth. cluster: int [n]: documents, or pieces of 16 slots of a document where those weigh less than
    16 equal ones.
    """

    chosen: list[np.ndarray]
    counted: np.ndarray
    cluster: np.ndarray


def slots_of(parts: list[Batch], steps: int) -> Slots:
    chosen, counted, documents = [], [], []
    for number, batch in enumerate(parts):
        loss_mask, document_ids = jnp.asarray(batch.loss_mask), jnp.asarray(batch.document_ids)
        masks = np.stack([np.asarray(supervised(loss_mask, document_ids, step)) for step in range(steps)])
        masks = np.logical_and.accumulate(masks, axis=0)
        rows, length = batch.ids.shape
        first = (number * rows + np.arange(rows)) * length
        chosen.append(masks[0])
        counted.append(masks[:, masks[0]])
        documents.append((first[:, None] + np.asarray(batch.document_ids)[:, :-1])[masks[0]])
    cluster = np.unique(np.concatenate(documents), return_inverse=True)[1]
    if effective_clusters(cluster) < _PIECE:
        first = np.unique(cluster, return_index=True)[1][cluster]  # a document's slots lie together
        pieces = np.stack([cluster, (np.arange(len(cluster)) - first) // _PIECE])
        cluster = np.unique(pieces, axis=1, return_inverse=True)[1].reshape(-1)
    return Slots(chosen, np.concatenate(counted, axis=-1), cluster)


def effective_clusters(cluster: np.ndarray) -> float:
    """How many clusters of equal size weigh as much as these, int [n]: (sum of sizes)^2 / sum of squared sizes.

    `Measured.above` cannot exceed its root.
    """
    sizes = np.bincount(cluster).astype(float)
    return float(sizes.sum() ** 2 / max((sizes**2).sum(), 1.0))


def _inverse(absolute: np.ndarray, vocab_size: int) -> np.ndarray:
    """Draft id of each target id, -1 where there is none; entries that lie outside the vocabulary are left out."""
    inverse = np.full(vocab_size, -1, np.int32)
    inside = (absolute >= 0) & (absolute < vocab_size)
    inverse[absolute[inside]] = np.flatnonzero(inside)
    return inverse
