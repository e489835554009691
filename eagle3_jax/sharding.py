"""How arrays lie on several devices: one mesh for target and draft, one table of logical axes.

    mesh axes   data: copies that see different rows. fsdp: the same, but each keeps a part of every weight. tensor: a
                part of the heads, of the MLP and of the vocabulary.
    batches     their rows over data and fsdp
    weights     by the name of the parameter, with its moments and averages, which bear the same name

A dimension that does not divide evenly stays whole on every device. XLA puts in the communication.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes.
RULES: dict[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),
    "hidden": ("fsdp",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocabulary": ("tensor",),
    "features": ("tensor",),
}

# Parameter -> logical axes of its dimensions, [out, in]. Not listed (norms, biases, scalars): whole everywhere.
PARAMETERS: dict[str, tuple[str, str]] = {
    "embed_tokens": ("vocabulary", "hidden"),
    "lm_head": ("vocabulary", "hidden"),
    "q_proj": ("heads", "hidden"),
    "k_proj": ("heads", "hidden"),
    "v_proj": ("heads", "hidden"),
    "o_proj": ("hidden", "heads"),
    "gate_proj": ("mlp", "hidden"),
    "up_proj": ("mlp", "hidden"),
    "down_proj": ("hidden", "mlp"),
    "fc": ("hidden", "features"),
}


def make_mesh(data: int | None, fsdp: int, tensor: int) -> Mesh | None:
    """The mesh over all devices of all processes; None for a single one. data None: as many as the others leave.

    Raises UserError if the sizes do not multiply to the number of devices.
    """
    devices = jax.devices()
    data = max(len(devices) // (fsdp * tensor), 1) if data is None else data
    if data * fsdp * tensor != len(devices):
        raise UserError(
            f"mesh of {data} x {fsdp} x {tensor} (data, fsdp, tensor) for {len(devices)} devices / their product must "
            "be the number of devices / set mesh.data, mesh.fsdp, mesh.tensor"
        )
    return None if len(devices) == 1 else Mesh(np.array(devices).reshape(data, fsdp, tensor), AXES)


def spec(sizes: Mapping[str, int], name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Where the dimensions of the parameter `name` go, on a mesh of these sizes."""
    logical = PARAMETERS.get(name, ())
    if len(logical) != len(shape):
        return PartitionSpec()
    axes = [RULES[axis] for axis in logical]
    parts = [int(np.prod([sizes[x] for x in axis])) for axis in axes]
    return PartitionSpec(*(a if size % n == 0 else None for a, n, size in zip(axes, parts, shape, strict=True)))


def shardings(mesh: Mesh, tree: Any) -> Any:
    """A sharding for every leaf of a tree of parameters, or of anything that has such trees in it (optimisers)."""

    def of(path: tuple, leaf: Any) -> NamedSharding:
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        name = str(keys[-2]) if len(keys) > 1 and keys[-1] == "weight" else ""
        return NamedSharding(mesh, spec(mesh.shape, name, leaf.shape))

    return jax.tree_util.tree_map_with_path(of, tree)


@dataclass(frozen=True)
class Placement:
    """Puts arrays where they belong. mesh None: one device, and nothing to do."""

    mesh: Mesh | None

    @property
    def rows_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(RULES["rows"]))

    def check_rows(self, rows: int, what: str) -> None:
        """UserError unless a batch of so many rows divides over the devices."""
        parts = 1 if self.mesh is None else self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        if rows % parts:
            raise UserError(f"{what}: {rows} is not a multiple of mesh.data x mesh.fsdp, {parts} / change one of them")

    def weights(self, tree: Any) -> Any:
        """Parameters, the same on every process, each device getting its part."""
        if self.mesh is None:
            return tree
        return jax.tree.map(_put, tree, shardings(self.mesh, tree))

    def own(self, rows: Any) -> Any:
        """Of the rows of a batch (a list, or an array [rows, ...]), those that this process's devices need."""
        begin, end = self._span(len(rows))
        return rows[begin:end]

    def batch(self, tree: Any, rows: int) -> Any:
        """Arrays that hold this process's rows, `own`, as arrays of a batch of `rows`."""
        if self.mesh is None:
            return tree
        begin, _ = self._span(rows)

        def whole(own: Any) -> jax.Array:
            own = np.asarray(own)

            def part(place: tuple[slice, ...]) -> np.ndarray:
                first, last, _ = place[0].indices(rows)
                return own[first - begin : last - begin]

            return jax.make_array_from_callback((rows, *own.shape[1:]), self.rows_sharding, part)

        return jax.tree.map(whole, tree)

    def _span(self, rows: int) -> tuple[int, int]:
        """First and last row that this process's devices need, the latter excluded."""
        if self.mesh is None:
            return 0, rows
        places = self.rows_sharding.addressable_devices_indices_map((rows,)).values()
        spans = [place[0].indices(rows) for place in places]
        return min(begin for begin, *_ in spans), max(end for _, end, _ in spans)

    def constrain(self, tree: Any) -> Any:
        """Inside jit: keeps a state where `weights` has put it."""
        if self.mesh is None:
            return tree
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings(self.mesh, tree))

    def constrain_rows(self, tree: Any, leading: int = 0) -> Any:
        """Inside jit: rows over the devices, after `leading` other dimensions."""
        if self.mesh is None:
            return tree
        sharding = NamedSharding(self.mesh, PartitionSpec(*[None] * leading, RULES["rows"]))
        return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, sharding), tree)

    def whole(self, tree: Any) -> Any:
        """Inside jit: every device has all of it, so that every process can read it."""
        if self.mesh is None:
            return tree
        return jax.tree.map(
            lambda a: jax.lax.with_sharding_constraint(a, NamedSharding(self.mesh, PartitionSpec())), tree
        )

    def gathered(self, tree: Any) -> Any:
        """A tree of sharded arrays as whole ones."""
        return tree if self.mesh is None else jax.jit(self.whole)(tree)


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    value = np.asarray(leaf)
    return jax.make_array_from_callback(value.shape, sharding, lambda place: value[place])


def is_main() -> bool:
    """Whether this process is the one that writes files and prints."""
    return jax.process_index() == 0


def sync(what: str) -> None:
    """Waits for all processes."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)


def from_main(*values: float) -> tuple[float, ...]:
    """The numbers of process 0, on every process; all must ask at the same point."""
    if jax.process_count() == 1:
        return values
    from jax.experimental import multihost_utils

    return tuple(np.asarray(multihost_utils.broadcast_one_to_all(np.asarray(values, np.float32))).tolist())


def to_host(tree: Any) -> Any:
    """Arrays as NumPy ones, whole on every process; all must ask at the same point."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


def any_process(flag: bool) -> bool:
    """Whether the flag is set on any process; all must ask at the same point."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(np.asarray(multihost_utils.process_allgather(np.asarray(flag))).any())
