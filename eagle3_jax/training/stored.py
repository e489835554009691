"""Features of packed rows from files of others, in place of the target's forward.

States are taken by the tap they are, never by their place in a file; what was said about them has been held against the
target before the first of them is used.
"""

import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import StoredConfig
from eagle3_jax.data.foreign.identify import check_fits, verify
from eagle3_jax.data.foreign.sample import Sample
from eagle3_jax.data.foreign.wiring import StateMap, state_map
from eagle3_jax.data.packing import Packed
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target
from eagle3_jax.taps import LastHidden, Taps, TapSet


class StoredFeatures:
    """The stored states of packed documents, read row by row.

    Args:
        samples: the documents in the order in which they were packed.
        packed: their rows.
        taps: the draft's taps, all of which must be stored.
        target: the target they were made with; states come in its dtype.
    Raises:
        UserError, WiringError: see `wiring.state_map` and `identify.verify`; also samples of different kinds.
    """

    def __init__(self, samples: list[Sample], packed: Packed, config: StoredConfig, taps: TapSet, target: Target):
        self._samples, self._packed, self._taps, self._dtype = samples, packed, taps, target.dtype
        first = samples[0]
        self.states: StateMap = state_map(first, config, target.num_layers)
        for sample in samples:
            check_fits(sample, target)
            if state_map(sample, config, target.num_layers) != self.states or sample.format != first.format:
                raise UserError(
                    f"stored features of two kinds / {first.path} ({first.format}), {sample.path} ({sample.format}) / "
                    "train on one"
                )
        # The first, one in the middle and the last: a folder may hold the files of several runs.
        for i in sorted({0, len(samples) // 2, len(samples) - 1}):
            verify(samples[i], self.states, target)
        self.states.require(taps, target.num_layers, str(first.path))

    def words(self) -> str:
        """What is read, in one line."""
        norm = "after" if self.states.normed else "before"
        return (
            f"stored features: {self._samples[0].format}, taps {self.states.taps()}, last hidden state {norm} the "
            "final norm; checked against the target"
        )

    def rows(self, rows: list[int]) -> tuple[Taps, LastHidden]:
        """States of packed rows as a batch: taps and last hidden [B, T, H]; row -1 is padding, all zeros."""
        length = self._packed.input_ids.shape[1]
        places = [self.states.place(tap) for tap in self._taps] + [self.states.teacher]
        size = self._samples[0].hidden_size
        batch = [np.zeros((len(rows), length, size), self._dtype) for _ in places]
        for b, row in enumerate(rows):
            begin = 0
            for member in self._packed.members[row] if row >= 0 else ():
                states = self._samples[member].states()
                count = min(len(states[0]), length)
                for array, place in zip(batch, places, strict=True):
                    array[b, begin : begin + count] = states[place][:count]
                begin += count
        *taps, last = map(jnp.asarray, batch)
        return Taps(taps, self._taps), LastHidden(last, self.states.normed)
