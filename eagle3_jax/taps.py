"""Taps: which points of the target's residual stream a tensor of features holds, as part of its type.

Canonical numbering (the index in Hugging Face `output_hidden_states`): 0 is the embedding output, k is the input of
block k (= output of block k-1, un-normed) and N, the number of blocks, is the last block's output *before* the final
norm. Hugging Face's own `hidden_states[N]` is after that norm: the one exception. Every config, file and message of
this project uses this numbering; foreign conventions are translated here and nowhere else.

`Taps` is a pytree whose `TapSet` is static metadata: it is visible while tracing and part of the jit cache key. `fuse`
is the only place where features are concatenated, and it compares both sets in plain Python before any number exists.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp

from eagle3_jax.errors import UserError

CONVERT = "python -m convert SRC DST --to speculators"  # makes a copy that says what its source does not


class WiringError(AssertionError, ValueError):
    """Target features are not the ones the draft was trained on (order, offset, count, or norm)."""


class UnknownTaps(WiringError):
    """A file names no taps, or so that systems read them differently. readings: the tap sets it may mean."""

    def __init__(self, message: str, readings: "Iterable[TapSet]" = ()):
        super().__init__(message)
        self.readings = tuple(readings)


class TapSet:
    """Ordered, unique tap points in canonical numbering. Equality and hash are over points *and* order.

    Args:
        points: canonical tap numbers, in the order in which they are concatenated; need not ascend.
    Raises:
        WiringError: empty, repeated, negative or non-integer points.
    """

    __slots__ = ("points",)
    points: tuple[int, ...]

    def __init__(self, points: "Iterable[int] | TapSet"):
        values = tuple(points.points if isinstance(points, TapSet) else points)
        if not values:
            raise WiringError("tap set is empty: name at least one tap, for example [2, 15, 27]")
        try:  # numpy's integers too
            numbers = [-1 if isinstance(p, bool) else operator.index(p) for p in values]
        except TypeError:
            numbers = [-1]
        if min(numbers) < 0:
            raise WiringError(f"taps {list(values)} must be integers >= 0 (0 = embedding, k = input of block k)")
        values = tuple(numbers)
        if len(set(values)) != len(values):
            raise WiringError(f"taps {list(values)} name a point twice: each tap may appear once")
        object.__setattr__(self, "points", values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("TapSet is immutable")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TapSet) and self.points == other.points

    def __hash__(self) -> int:
        return hash(("TapSet", self.points))

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self):
        return iter(self.points)

    def __repr__(self) -> str:
        return f"TapSet({list(self.points)})"

    def words(self, num_layers: int | None = None) -> str:
        """The set in words, for messages: `[embedding, block 2 input, last block output before the final norm]`."""
        return "[" + ", ".join(_point_in_words(p, num_layers) for p in self.points) + "]"

    def check(self, num_layers: int) -> "TapSet":
        """Returns self if every tap exists in a target of `num_layers` blocks, otherwise raises WiringError."""
        beyond = [p for p in self.points if p > num_layers]
        if beyond:
            raise WiringError(
                f"tap {beyond[0]} does not exist: the target has {num_layers} blocks, so taps go from 0 (embedding) "
                f"to {num_layers} (last block output before the final norm); got {list(self.points)}"
            )
        return self


def _point_in_words(point: int, num_layers: int | None) -> str:
    if point == 0:
        return "embedding"
    if num_layers is not None and point == num_layers:
        return f"tap {point} = last block output before the final norm"
    return f"block {point} input"


def paper_taps(num_layers: int) -> TapSet:
    """The EAGLE-3 default, low / middle / high: (2, N//2, N-3) in canonical numbering (spec section 2).

    Raises UserError for targets so shallow that the three points collapse or disorder.
    """
    points = (2, num_layers // 2, num_layers - 3)
    if not 0 < points[0] < points[1] < points[2]:
        raise UserError(
            f"the default taps (2, N//2, N-3) give {list(points)} for a target of {num_layers} blocks / taps / "
            f"name distinct taps between 0 and {num_layers} yourself, for example taps: [0, {num_layers}]"
        )
    return TapSet(points)


def from_block_outputs(ids: Sequence[int]) -> TapSet:
    """SGLang/SpecForge/ModelOpt ids (output of block i) to canonical taps: i + 1."""
    return TapSet([i + 1 for i in ids])


def to_block_outputs(taps: TapSet) -> list[int]:
    """Canonical taps to ids that mean "output of block i". The embedding (tap 0) cannot be said: WiringError."""
    if 0 in taps.points:
        raise WiringError(f"taps {taps.words()} hold the embedding, which a list of block outputs cannot name")
    return [p - 1 for p in taps.points]


def resolve_taps(
    where: str,
    top: Any = None,
    nested: Any = None,
    own: Any = None,
    given: TapSet | None = None,
    convention: str | None = None,
    num_layers: int | None = None,
) -> TapSet:
    """The taps that a draft's config.json means, from all places that may name them (spec section 2).

    top: the top-level list, block inputs in vLLM and speculators. nested: the list in eagle_config: block outputs if
    its first id is 1; else the older SGLang adds one and the newer does not, which `convention` ("block-input" or
    "block-output", how the file's ids count) decides. own: the canonical list of an eagle3_jax block. given: the
    user's, which must agree. num_layers: of the target, which not every reading may have room in.
    Raises WiringError where two places contradict each other, UnknownTaps where nothing decides.
    """
    for ids in (top, nested, own):
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise WiringError(f"{where}: eagle_aux_hidden_state_layer_ids is {ids!r} / it must be a list of numbers")
    readings = _readings(where, top, nested, convention)
    if num_layers is not None:  # a reading that names a block the target does not have is none
        readings = [r for r in readings if max(r.points) <= num_layers] or readings
    for name, source in (("eagle3_jax.taps", own), ("as given", given)):
        if source is not None:
            chosen = TapSet(source)
            if chosen not in readings and readings:
                raise WiringError(
                    f"expected {readings[0].words()}, got {chosen.words()} ({name}) / {where} / one of the two is wrong"
                )
            readings = [chosen]
    if len(readings) == 1:
        return readings[0]
    if readings:
        raise UnknownTaps(
            f"{where} has eagle_config ids {nested}: the older SGLang adds one to them ({readings[0].words()}), the "
            f"newer only where the first is 1 ({readings[1].words()}) / choose with load_draft(taps=) or "
            f"{CONVERT} --convention block-output (the former) or block-input (the latter), or --taps",
            readings,
        )
    guesses = likely_taps(num_layers)
    listed = " or ".join(str(list(guess)) for guess in guesses) or "[2, N//2, N-3] or [3, N//2+1, N-2]"
    raise UnknownTaps(
        f"{where} does not say which target layers the draft reads (eagle_aux_hidden_state_layer_ids) / name them with "
        f"load_draft(taps=) or {CONVERT} --taps: likely are {listed}"
        + ("" if guesses else " of the target's N blocks")
        + " (the usual default, as block inputs and as block outputs)",
        guesses,
    )


def likely_taps(num_layers: int | None) -> list[TapSet]:
    """What a draft without ids most likely reads: the default (2, N//2, N-3) as block inputs, then as block outputs
    (speculators 0.3 and 0.4 captured those); empty for an unknown or too shallow target."""
    if num_layers is None or not 2 < num_layers // 2 < num_layers - 3:
        return []
    return [paper_taps(num_layers), from_block_outputs(paper_taps(num_layers).points)]


def _readings(where: str, top: list[int] | None, nested: list[int] | None, convention: str | None) -> list[TapSet]:
    as_outputs = convention == "block-output"
    inner: list[TapSet] = []
    if nested is not None:
        outputs, inputs = from_block_outputs(nested), TapSet(nested)
        inner = [outputs] if as_outputs or (convention is None and nested[0] == 1) else [outputs, inputs]
        inner = [inputs] if convention == "block-input" else inner
    if top is None:
        return inner
    outer = from_block_outputs(top) if as_outputs and nested is None else TapSet(top)
    if inner and outer not in inner:
        raise WiringError(
            f"{where} contradicts itself: its top-level ids {top} mean {outer.words()}, its eagle_config ids {nested} "
            f"mean {' or '.join(reading.words() for reading in inner)} / remove the wrong list"
        )
    return [outer]


@jax.tree_util.register_pytree_with_keys_class
class Taps:
    """Target features at each point of a tap set; a pytree with the set as static metadata.

    Args:
        arrays: one array [..., H] a point, in the order of the set; equal shapes and dtypes.
        tap_set: which points they are.
    Raises:
        WiringError: another number of arrays than points, or arrays that differ in shape or dtype.
    """

    def __init__(self, arrays: Sequence[jax.Array], tap_set: TapSet):
        self.arrays = tuple(arrays)
        self.tap_set = tap_set
        _check_arrays(self)

    @classmethod
    def from_fused(cls, array: jax.Array, tap_set: TapSet | Sequence[int]) -> "Taps":
        """Splits features already concatenated, [..., A*H], into the A taps of `tap_set`."""
        tap_set = TapSet(tap_set)
        if array.shape[-1] % len(tap_set):
            raise WiringError(
                f"features of width {array.shape[-1]} do not divide into the {len(tap_set)} taps {tap_set.words()}"
            )
        return cls(jnp.split(array, len(tap_set), axis=-1), tap_set)

    def map(self, function) -> "Taps":
        """The same taps with `function` applied to each array; the set cannot change on the way."""
        return Taps([function(a) for a in self.arrays], self.tap_set)

    def __repr__(self) -> str:
        return f"Taps({self.tap_set.words()}, {[getattr(a, 'shape', a) for a in self.arrays]})"

    def tree_flatten_with_keys(self):
        keys = [jax.tree_util.GetAttrKey(f"tap_{p}") for p in self.tap_set.points]
        return list(zip(keys, self.arrays, strict=True)), self.tap_set

    @classmethod
    def tree_unflatten(cls, tap_set: TapSet, arrays):
        # jax unflattens with placeholders (None, object()) as well as arrays, so nothing is validated here.
        taps = object.__new__(cls)
        taps.arrays, taps.tap_set = tuple(arrays), tap_set
        return taps


def _check_arrays(taps: Taps) -> None:
    if len(taps.arrays) != len(taps.tap_set):
        raise WiringError(f"{len(taps.arrays)} feature arrays for the {len(taps.tap_set)} taps {taps.tap_set.words()}")
    kinds = {(tuple(a.shape), jnp.dtype(a.dtype)) for a in taps.arrays}
    if len(kinds) > 1:
        raise WiringError(f"features of {taps.tap_set.words()} differ in shape or dtype: {sorted(map(str, kinds))}")


def require(got: TapSet, expected: TapSet) -> None:
    """Raises WiringError with both sets in words unless they are equal, order included."""
    if got != expected:
        raise WiringError(f"expected {expected.words()}, got {got.words()}")


def require_taps(features: Any) -> None:
    """Raises WiringError for features that do not say which taps they hold."""
    if not isinstance(features, Taps):
        raise WiringError(
            f"features are a {type(features).__name__}, which does not say what taps it holds / give "
            "target.forward(...).taps, or Taps.from_fused(array, taps)"
        )


def fuse(taps: Taps, expected: TapSet | Sequence[int]) -> jax.Array:
    """Concatenates features for the draft's fc: A arrays [..., H] -> [..., A*H], in the order of the set.

    The only concatenation of target features in the project (EAGLE-3 paper, section 3.1). The comparison of the two
    sets is plain Python and runs while tracing; it does not depend on chex being enabled.
    Raises WiringError if `taps` is not exactly `expected`.
    """
    require_taps(taps)
    require(taps.tap_set, TapSet(expected))
    _check_arrays(taps)
    chex.assert_equal_shape(taps.arrays)
    chex.assert_type(taps.arrays, [taps.arrays[0].dtype] * len(taps.arrays))
    return jnp.concatenate(taps.arrays, axis=-1)


@jax.tree_util.register_pytree_node_class
class LastHidden:
    """The target's last hidden state [..., H], from which the teacher's logits are made.

    A field of its own, never "the last of the taps". Whether the final norm was applied is static metadata, since
    norming twice or not at all gives plausible but wrong targets (field reports: speculators PR #313).
    """

    def __init__(self, array: jax.Array, normed: bool):
        self.array, self.normed = array, normed

    def before_norm(self) -> jax.Array:
        """The array, or WiringError when it is after the final norm."""
        if self.normed:
            raise WiringError("expected the last hidden state before the final norm, got it after the final norm")
        return self.array

    def after_norm(self, norm: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The array after the final norm: `norm` is applied unless it was already."""
        return self.array if self.normed else norm(self.array)

    def tree_flatten(self):
        return (self.array,), self.normed

    @classmethod
    def tree_unflatten(cls, normed: bool, children):
        last = object.__new__(cls)
        last.array, last.normed = children[0], normed
        return last
