"""Which other wirings are plausible: the faults of real systems (spec sections 2 and 8), as neighbours of a wiring."""

import dataclasses
import itertools
from collections.abc import Iterable

from eagle3_jax.doctor.wiring import Wiring, with_config, with_rope
from eagle3_jax.models.rope import RopeConfig
from eagle3_jax.taps import TapSet

_THETAS = (10000.0, 500000.0, 1000000.0)  # the default of training code that reads none, of Llama 3, of Qwen
_MOST_PERMUTED = 4  # taps; more have too many orders, and single exchanges remain


def tap_candidates(wiring: Wiring, num_layers: int) -> list[Wiring]:
    """Other taps under the same network: conventions, order, embedding in or out, last layer in or out.

    Point N+1 stands for the last block's output after the final norm. No wiring is repeated.
    """
    points = _stated(wiring, num_layers)
    lists = [
        *_conventions(points),
        *_orders(points),
        *_embedding_and_last(points, num_layers),
        *_usual(len(points), num_layers),
        *_replacements(points, num_layers),
    ]
    found = (_with_points(wiring, p, num_layers) for p in lists if _possible(p, num_layers))
    return [w for w in dict.fromkeys(found) if w != wiring]


def network_candidates(wiring: Wiring, has_norm: bool, target_rope: RopeConfig) -> list[Wiring]:
    """The same taps in another network: residual, norm before fc, fed-back state, rope.

    has_norm: the draft stores weights of a norm before fc; those of either kind serve the other, joined or split.
    """
    config = wiring.config
    flips = [{name: not getattr(config, name)} for name in ("norm_before_residual", "norm_output")]
    if has_norm:
        flips += [{"norm_before_fc": joint, "fc_norm": each} for joint, each in ((0, 0), (1, 0), (0, 1))]
    found = [with_config(wiring, **{k: bool(v) for k, v in flip.items()}) for flip in flips]
    found += [with_rope(wiring, rope) for rope in _ropes(config.decoder.rope, target_rope)]
    return [w for w in dict.fromkeys(found) if w != wiring]


def reversed_feedback(wiring: Wiring) -> Wiring:
    """`norm_output` flipped; depth 1 cannot tell the two apart."""
    return with_config(wiring, norm_output=not wiring.config.norm_output)


def _stated(wiring: Wiring, num_layers: int) -> tuple[int, ...]:
    return tuple(num_layers + 1 if wiring.last_normed and p == num_layers else p for p in wiring.taps)


def _with_points(wiring: Wiring, points: tuple[int, ...], num_layers: int) -> Wiring:
    taps = TapSet([min(p, num_layers) for p in points])
    return dataclasses.replace(with_config(wiring, taps=taps), last_normed=num_layers + 1 in points)


def _possible(points: tuple[int, ...], num_layers: int) -> bool:
    canonical = {min(p, num_layers) for p in points}
    return len(canonical) == len(points) and all(0 <= p <= num_layers + 1 for p in points)


def _conventions(points: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    """Ids that mean block outputs in one place and block inputs in another, once or twice; an embedding stays."""
    for by in (1, -1, 2, -2):
        yield tuple(p + by for p in points)
        yield tuple(p + by if p else 0 for p in points)
        yield (points[0], *(p + by for p in points[1:]))


def _orders(points: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    if len(points) <= _MOST_PERMUTED:
        yield from itertools.permutations(points)
    for i, j in itertools.combinations(range(len(points)), 2):
        swapped = list(points)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        yield tuple(swapped)


def _embedding_and_last(points: tuple[int, ...], num_layers: int) -> Iterable[tuple[int, ...]]:
    """A list that one side cut at its other end: [0, a, b] read as [a, b, c], or the reverse, with any c."""
    for shift in ((0, *points[:-1]), (0, *points[1:])):
        for by in (0, 1, -1):
            yield tuple(p + by if p else 0 for p in shift)
    for tail in range(1, num_layers + 2):
        yield (*points[1:], tail)


def _usual(count: int, num_layers: int) -> Iterable[tuple[int, ...]]:
    """The defaults of all systems (2, N//2, N-3), one off either way, with the embedding or the last state."""
    for by in (0, -1, 1):
        paper = (2 + by, num_layers // 2 + by, num_layers - 3 + by)
        last = (num_layers, num_layers + 1)
        wider = [paper, (0, *paper), *((*paper, end) for end in last)]
        yield from (w[begin : begin + count] for w in wider for begin in range(len(w) - count + 1))


def _replacements(points: tuple[int, ...], num_layers: int) -> Iterable[tuple[int, ...]]:
    """Each tap replaced by every other point, the last state after the final norm included."""
    for i in range(len(points)):
        for other in range(num_layers + 2):
            yield (*points[:i], other, *points[i + 1 :])


def _ropes(own: RopeConfig, target: RopeConfig) -> list[RopeConfig]:
    """The target's rotation (but for LongRoPE, which no draft has), the own one without scaling, and the thetas that
    systems fall back on."""
    as_target = dataclasses.replace(target, head_dim=own.head_dim, max_positions=own.max_positions)
    plain = dataclasses.replace(own, kind="default", scaling=())
    thetas = dict.fromkeys((own.theta, target.theta, *_THETAS))
    others = [] if target.kind == "longrope" else [as_target]
    return [*others, *(dataclasses.replace(r, theta=theta) for r in (plain, own) for theta in thetas)]
