"""Many prompts through a fixed batch: a slot whose request has finished takes the next one at once.

Plain decoding, for writing training answers. The round's shapes are fixed, so it is compiled once whatever requests
come and go; reading prompts is compiled once for each power of two that their lengths are padded to.
"""

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.models.target import Target
from eagle3_jax.sharding import Placement
from eagle3_jax.speculate.generate import pad_prompts, padded_length, pair, reach_of, round_up
from eagle3_jax.speculate.request import SamplingParams, cut, device_sampling
from eagle3_jax.speculate.round import Committed, State, prefill, speculate
from eagle3_jax.speculate.strategy import PLAIN

_GROUP = 4  # prompts read together: enough rows for a fast matmul, few enough that slots do not wait for each other


@dataclass
class Request:
    """index names the request to the caller; it is also added to the seed, so that its sample is its own."""

    index: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)


def generate_many(
    target: Target,
    requests: Iterable[Request],
    max_prompt: int,
    max_new_tokens: int,
    slots: int = 32,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: frozenset[int] | None = None,
) -> Iterator[Request]:
    """Yields requests as they finish, with `tokens` filled in (up to and with a stop token, or max_new_tokens).

    max_prompt: longest prompt; sizes the caches. stop: None = the target's end tokens. Order is that of finishing.
    """
    models, weights = pair(target, None)
    window = target.config.max_positions
    stop = frozenset(target.eos_token_ids) if stop is None else stop
    cache_length = max(padded_length(max_prompt), round_up(max_prompt + max_new_tokens + 2, 64))
    queue, active = deque(requests), [None] * slots
    state, ahead = None, jax.default_backend() != "cpu"  # as in `generate`
    dispatched: deque[tuple[Committed, list[Request | None]]] = deque()
    while queue or any(active):
        free = [slot for slot, request in enumerate(active) if request is None]
        if queue and (len(free) >= min(_GROUP, slots) or not any(active)):
            group = [queue.popleft() for _ in range(min(len(free), _GROUP, len(queue)))]
            settings = (max_new_tokens, temperature, top_p, seed)
            new, first = _read_prompts(target, models, weights, group, cache_length, *settings)
            places = [free[min(i, len(group) - 1)] for i in range(_GROUP)]
            if state is None:
                state = models.placement.made(functools.partial(_widen, slots=slots), new)
            state = _insert(models.placement, state, new, jnp.asarray(places))
            for slot, request, token in zip(places, group, first, strict=False):
                active[slot] = request
                request.tokens.append(int(token))
        else:
            state, committed = speculate(models, PLAIN, weights, state)
            dispatched.append((committed, list(active)))
            if len(dispatched) > ahead:
                committed, took_part = dispatched.popleft()
                tokens = np.asarray(committed.tokens)[:, 0]
                for slot, request in enumerate(took_part):
                    if request is not None and request is active[slot]:
                        request.tokens.append(int(tokens[slot]))
        for slot, request in enumerate(active):
            if request is not None and _ended(request, stop, max_new_tokens, window):
                active[slot] = None
                yield request


def _ended(request: Request, stop: frozenset[int], max_new_tokens: int, window: int) -> bool:
    """Stopped, long enough, or at the end of the target's context."""
    room = min(max_new_tokens, window - len(request.prompt)) - len(request.tokens) + 1
    return cut(request.tokens[-1:], room, stop)[1] is not None


def _read_prompts(target, models, weights, group: list[Request], cache_length: int, new: int, temperature, top_p, seed):
    """Prefills a group, padded to the fixed group size with copies of its last request."""
    padded = group + [group[-1]] * (_GROUP - len(group))
    prompts = [request.prompt for request in padded]
    params = [SamplingParams(1, temperature, top_p, seed=seed + request.index) for request in padded]
    sampling = device_sampling(target, prompts, params)
    limits = [min(new, target.config.max_positions - len(prompt)) for prompt in prompts]
    reach = reach_of(target, prompts, limits)
    state, first = prefill(models, cache_length, weights, *pad_prompts(prompts), sampling, reach)
    return state, np.asarray(first)


def _widen(state: State, slots: int) -> State:
    """A state of `slots` rows to insert into; what the rows hold does not matter."""
    return jax.tree.map(lambda x: x[jnp.zeros(slots, jnp.int32)], state)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _insert(placement: Placement, state: State, new: State, places: jax.Array) -> State:
    return placement.kept(jax.tree.map(lambda old, rows: old.at[places].set(rows), state, new))
