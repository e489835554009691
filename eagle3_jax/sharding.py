"""How arrays lie on several devices: one mesh for target and draft, one table of logical axes.

    mesh axes   data: copies that see different rows. fsdp: the same, but each keeps a part of every weight. tensor: a
                part of the heads, of the MLP and of the vocabulary.
    batches     their rows over data and fsdp
    weights     by the name of the parameter, with its moments and averages, which bear the same name
    caches      the key/value heads over tensor

A dimension that does not divide evenly stays whole on every device. XLA puts in the communication.
"""

import hashlib
import math
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.errors import UserError
from eagle3_jax.models.attention import KV

AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes.
RULES: dict[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),
    "hidden": ("fsdp",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocabulary": ("tensor",),
    "features": ("tensor",),
    "latent": ("fsdp",),
    "experts": (),
    "whole": (),
}

# Parameter -> logical axes of its dimensions, [out, in]; with a third one in front it holds a kernel for each expert.
# Not listed (norms, biases, scalars): whole everywhere.
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
    "gate": ("experts", "hidden"),
    "q_a_proj": ("whole", "hidden"),
    "q_b_proj": ("heads", "latent"),
    "kv_a_proj_with_mqa": ("whole", "hidden"),
    "kv_b_proj": ("heads", "latent"),
}

# Logical axes of a layer's keys and of its values.
CACHE = ("whole", "heads", "whole", "whole")


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


def parse_mesh(text: str) -> Mesh | None:
    """The mesh for generating and serving that `tensor=4` or `fsdp=2,tensor=2` asks for, over this machine's first
    devices; None for one device.

    Raises UserError for anything else, for `data` (all devices see the same requests), and for too few devices.
    """
    sizes = {"fsdp": 1, "tensor": 1}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*=\s*([1-9]\d*)\s*", part)
        if found and found[1] == "data":
            raise UserError(
                f"mesh {text} / all devices work on the same requests here, data is for training / start one process "
                "for each copy"
            )
        if not found or found[1] not in sizes:
            raise UserError(f"mesh {text} / {part.strip() or 'nothing'} is no axis with a size / give it as tensor=4")
        sizes[found[1]] = int(found[2])
    wanted, devices = math.prod(sizes.values()), jax.local_devices()
    if wanted > len(devices):
        raise UserError(
            f"mesh {text} / it needs {wanted} devices, this machine has {len(devices)} ({devices[0].platform}) / "
            "lower a size"
        )
    shape = (1, sizes["fsdp"], sizes["tensor"])
    return None if wanted == 1 else Mesh(np.array(devices[:wanted]).reshape(shape), AXES)


def spec(sizes: Mapping[str, int], name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Where the dimensions of the parameter `name` go, on a mesh of these sizes."""
    logical = PARAMETERS.get(name, ())
    if logical and len(shape) == 3:
        logical = ("experts", *logical)
    return _divided(sizes, logical, shape) if len(logical) == len(shape) else PartitionSpec()


def _divided(sizes: Mapping[str, int], logical: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """The mesh axes of each dimension, None where it does not divide by their sizes."""
    axes = [RULES[axis] for axis in logical]
    parts = [math.prod(sizes[x] for x in axis) for axis in axes]
    return PartitionSpec(*(a or None if size % n == 0 else None for a, n, size in zip(axes, parts, shape, strict=True)))


def shardings(mesh: Mesh, tree: Any) -> Any:
    """A sharding for every leaf of a tree of parameters, or of anything that has such trees in it (optimisers)."""

    def of(path: tuple, leaf: Any) -> NamedSharding:
        keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        return _sharding(mesh, keys, leaf.shape)

    return jax.tree_util.tree_map_with_path(of, tree)


def _sharding(mesh: Mesh, keys: list[str], shape: tuple[int, ...]) -> NamedSharding:
    name = keys[-2] if len(keys) > 1 and keys[-1] in ("weight", "scale") else ""
    if keys[-1:] == ["scale"]:  # of int8 codes: one an output channel, which lies where that lies
        return NamedSharding(mesh, PartitionSpec(*spec(mesh.shape, name, (*shape, 1))[:-1]))
    return NamedSharding(mesh, spec(mesh.shape, name, shape))


@dataclass(frozen=True)
class Placement:
    """Puts arrays where they belong. mesh None: one device, and nothing to do."""

    mesh: Mesh | None

    def __post_init__(self):
        if self.mesh is not None and self.mesh.axis_names != AXES:
            raise UserError(f"a mesh with the axes {self.mesh.axis_names} / it needs {AXES}, of size 1 if unused")

    @property
    def rows_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(RULES["rows"]))

    @property
    def row_parts(self) -> int:
        """In how many parts the rows of a batch lie on different devices."""
        return 1 if self.mesh is None else self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    @property
    def words(self) -> str | None:
        """As `tensor=4`; None on one device."""
        return None if self.mesh is None else ",".join(f"{axis}={n}" for axis, n in self.mesh.shape.items() if n > 1)

    def uneven(self, name: str, heads: int, kv_heads: int) -> str | None:
        """One line where the heads of a model do not divide over the devices, else None."""
        parts = 1 if self.mesh is None else self.mesh.shape["tensor"]
        whole = [f"{n} {kind}" for n, kind in ((heads, "query"), (kv_heads, "key/value")) if n % parts]
        if not whole:
            return None
        so = "its keys and values are whole everywhere" if kv_heads % parts else "parts of them are moved about"
        return f"note: the {name} has {' and '.join(whole)} heads, which do not divide over tensor={parts}: {so}"

    def check_rows(self, rows: int, what: str) -> None:
        """UserError unless a batch of so many rows divides over the devices."""
        parts = self.row_parts
        if rows % parts:
            raise UserError(f"{what}: {rows} is not a multiple of mesh.data x mesh.fsdp, {parts} / change one of them")

    def weights(self, tree: Any) -> Any:
        """Parameters, the same on every process, each device getting its part; those that are there already stay."""
        if self.mesh is None:
            return tree
        return jax.tree.map(_put, tree, shardings(self.mesh, tree))

    def parameter(self, name: str, value: np.ndarray, dtype: Any) -> jax.Array:
        """The parameter of a dotted name from host memory, each device getting its part, cast on the way; dtype None:
        as it is."""
        if self.mesh is None:
            return jnp.asarray(value, dtype)
        return _parts(value, dtype, self._sharding(name, value.shape))

    def zeros(self, name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """The same, of zeros that no host memory holds."""
        sharding = None if self.mesh is None else self._sharding(name, shape)
        return jnp.zeros(shape, dtype, device=sharding)

    def entry(self, name: str, value: np.ndarray, dtype: Any) -> jax.Array:
        """What goes into one entry of the parameter, such as the kernel of one expert, placed like that entry."""
        if self.mesh is None:
            return jnp.asarray(value, dtype)
        stack = self._sharding(name, (1, *value.shape))
        return _parts(value, dtype, NamedSharding(self.mesh, PartitionSpec(*stack.spec[1:])))

    def _sharding(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        return _sharding(self.mesh, name.split("."), shape)

    def everywhere(self, tree: Any) -> Any:
        """Arrays whole on every device."""
        return tree if self.mesh is None else jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))

    def kept(self, tree: Any) -> Any:
        """Inside jit: what one program leaves to the next lies the same way each time, so that nothing is compiled
        again and its memory can be taken over: keys and values by their heads, all else whole."""
        if self.mesh is None:
            return tree

        def put(part: Any) -> Any:
            parts = _divided(self.mesh.shape, CACHE, part.k.shape) if isinstance(part, KV) else PartitionSpec()
            return jax.lax.with_sharding_constraint(part, NamedSharding(self.mesh, parts))

        return jax.tree.map(put, tree, is_leaf=lambda part: isinstance(part, KV))

    def made(self, make: Callable, *arrays: Any) -> Any:
        """`kept` of make(*arrays), of which no device ever holds more than its part."""
        return make(*arrays) if self.mesh is None else jax.jit(lambda *given: self.kept(make(*given)))(*arrays)

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


ONE_DEVICE = Placement(None)


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    return _parts(np.asarray(leaf), None, sharding)


def _parts(value: np.ndarray, dtype: Any, sharding: NamedSharding) -> jax.Array:
    dtype = value.dtype if dtype is None else dtype
    return jax.make_array_from_callback(value.shape, sharding, lambda place: value[place].astype(dtype, copy=False))


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


def shared(action: Callable[[Any], Any], items: list, what: str) -> list:
    """[action(item) for item in items], of which each process computes a share and gets the rest from the others; all
    must ask at the same point.

    Raises UserError, naming `what` the items are, if the processes do not have the same ones.
    """
    processes, own = jax.process_count(), jax.process_index()
    results = [action(item) for item in items[own::processes]]
    if processes == 1:
        return results
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode())
    found = [pickle.loads(share) for share in _from_all(pickle.dumps((digest.digest(), results)))]
    differing = [process for process, (theirs, _) in enumerate(found) if theirs != found[0][0]]
    if differing:
        raise UserError(f"processes 0 and {differing[0]} do not read the same / {what} / copy it there again")
    results = [None] * len(items)
    for process, (_, theirs) in enumerate(found):
        results[process::processes] = theirs
    return results


def _from_all(own: bytes, part: int = 1 << 26) -> list[bytes]:
    """What each process has, on every process. It goes through the memory of devices, `part` bytes at a time."""
    from jax.experimental import multihost_utils

    def gathered(equally_long: bytes) -> list[bytes]:
        array = multihost_utils.process_allgather(np.frombuffer(equally_long, np.uint8))
        return [theirs.tobytes() for theirs in np.asarray(array)]

    sizes = [int.from_bytes(size) for size in gathered(len(own).to_bytes(8))]
    longest = max(sizes)
    parts = [
        gathered(own[begin : begin + part].ljust(min(part, longest - begin), b"\0"))
        for begin in range(0, longest, part)
    ]
    return [b"".join(theirs)[:size] for theirs, size in zip(zip(*parts, strict=True), sizes, strict=True)]


def any_process(flag: bool) -> bool:
    """Whether the flag is set on any process; all must ask at the same point."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(np.asarray(multihost_utils.process_allgather(np.asarray(flag))).any())
