"""What a family of targets has to state: how its config.json is read, its block, and its checkpoint's names.

docs/add-a-target.md shows how to write one.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.decoder import CausalLM, MakeBlock, plain_block

# (name, array) as stored
Stored = Iterable[tuple[str, np.ndarray]]
# (our name, array), or (our name, array, i) for entry i of a stacked parameter
Placed = Iterator[tuple]


def same_names(config: DecoderConfig, tensors: Stored) -> Placed:
    """The key map of families whose checkpoints use the names of the modules in `blocks`."""
    return iter(tensors)


@dataclass(frozen=True)
class Family:
    """A family of targets.

    architecture: its name in config.json. read: (config.json, where) to the static facts, refusing what the family's
    code would not compute. block: the block of a layer. place: the key map, from tensors as stored to our names; a
    tensor that is fused over several of ours is split there. float32: endings of names that keep that precision.
    """

    architecture: str
    read: Callable[[dict[str, Any], str], DecoderConfig]
    block: MakeBlock = plain_block
    place: Callable[[DecoderConfig, Stored], Placed] = same_names
    float32: tuple[str, ...] = ()

    def build(self, config: DecoderConfig) -> nnx.Module:
        """The module; to be called under `nnx.eval_shape`, which allocates nothing."""
        return CausalLM(config, self.block)
