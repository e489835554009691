"""The engine: requests in, Deltas out. One thread owns the device and goes round the loop

    take what callers ask for (`stream`, `cancel`)  ->  scheduler: who runs  ->  runner: run it  ->  deliver Deltas

Callers live in asyncio loops; a Delta reaches theirs through `call_soon_threadsafe`. What goes wrong with one request
(logits that are not finite, its grammar raising, a strategy of its own that cannot be compiled) ends that request
alone; anything else ends the thread, visibly.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np

from eagle3_jax.draft.draft import Draft
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target
from eagle3_jax.serving.cache import Place, SlotCache, bytes_per_token
from eagle3_jax.serving.programs import Outcome
from eagle3_jax.serving.requests import (
    Delta,
    EngineStats,
    EngineStopped,
    QueueFull,
    Request,
    Settings,
    TokenLogprobs,
)
from eagle3_jax.serving.runner import Runner
from eagle3_jax.serving.scheduler import Chunk, Round, Scheduler, Sequence
from eagle3_jax.serving.strategies import AUTO, Strategies
from eagle3_jax.speculate.controller import Controller, trained_acceptance
from eagle3_jax.speculate.request import bias_row, check_params, check_prompt, cut, spread
from eagle3_jax.speculate.scores import MOST_LIKELIEST
from eagle3_jax.speculate.strategy import Strategy, parse_strategy

_log = logging.getLogger("eagle3_jax.serving")
_LAST_STEP = 3.0  # seconds that the step in which a drain ends may still take


class Engine:
    """Serves a target and, with a draft, speculates. `start` it, then `stream` requests; see `requests` for the words.

    state: "warming" (requests wait), "ready", "draining", "stopped", or "dead", and then `error` says why.
    """

    def __init__(self, target: Target, draft: Draft | None, settings: Settings):
        if settings.max_len > target.config.max_positions:
            window = target.config.max_positions
            raise UserError(f"--max-len {settings.max_len} / the target's context is {window} tokens / lower it")
        for name in ("slots", "max_len", "chunk"):
            if getattr(settings, name) < 1:
                raise UserError(f"{name} is {getattr(settings, name)} / it must be at least 1")
        draft = None if draft is None else draft.bind(target)
        self.settings = settings
        self.state, self.error = "warming", None
        self._target, self._draft = target, draft
        self._strategies = Strategies(draft, settings)
        known = tuple(self._strategies.known.values())
        self._runner = Runner(target, draft, settings.slots, settings.max_len, settings.chunk, known)
        border = target.config.rope_border  # keys of a text that may pass it are no prefix of one that will not
        reuse = settings.prefix_reuse and (border is None or settings.max_len <= border)
        self._cache = SlotCache(settings.slots, draft is not None, reuse)
        self._scheduler = Scheduler(self._cache, settings.chunk)
        depth = self._strategies.depth
        self._controller = Controller(depth, trained_acceptance(draft)) if depth else None
        self._steady: int | None = None  # for how many requests the newest round of auto was, if only rounds ran since
        self._seconds = 1.0  # a request's running time, a moving average
        self._changed = threading.Condition()  # guards the next four
        self._inbox: list[Sequence] = []
        self._live: dict[str, Sequence] = {}
        self._accepting, self._leave = True, False
        self._thread = threading.Thread(target=self._run, name="eagle3-engine", daemon=True)

    # What callers ask, from any thread.

    @property
    def strategies(self) -> dict[str, Strategy]:
        """Those that are compiled, or will be by the first rounds of a request that waits."""
        return self._strategies.known

    def start(self) -> None:
        """Starts the thread, which compiles every program and is then ready."""
        self._thread.start()

    def check(self, request: Request) -> None:
        """Raises UserError, with the numbers, for a request that can never be served."""
        self._strategies.of(request)
        check_prompt(0, list(request.prompt), self._target)
        check_params(request.params, self._target.config.vocab_size)
        if len(request.prompt) >= self.settings.max_len:
            raise UserError(
                f"the prompt has {len(request.prompt)} tokens / the server's context, prompt and answer together, is "
                f"{self.settings.max_len} / shorten it"
            )
        most = min(MOST_LIKELIEST, self._target.config.vocab_size)
        if request.logprobs is not None and not 0 <= request.logprobs <= most:
            raise UserError(f"logprobs is {request.logprobs} / of at most {most} likeliest tokens, or 0")

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        """The Deltas of a request, the last one with a finish_reason. Leaving early cancels the request.

        Raises UserError (`check`), QueueFull, EngineStopped.
        """
        self.check(request)
        loop, deltas = asyncio.get_running_loop(), asyncio.Queue()
        sequence = self._submit(request, lambda delta: loop.call_soon_threadsafe(deltas.put_nowait, delta))
        try:
            while True:
                delta = await deltas.get()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._cancel(sequence)

    def cancel(self, request_id: str) -> None:
        """Ends a request with finish_reason "cancelled" before its next round; nothing if it is not there."""
        with self._changed:
            sequence = self._live.get(request_id)
        if sequence is not None:
            self._cancel(sequence)

    async def drain(self, seconds: float | int) -> None:
        """Takes no more requests, lets the running ones finish, cancels them after `seconds`; then the thread ends.

        A thread that is in the middle of a long program by then, as when it compiles, is left to itself a little later:
        the state stays "draining".
        """
        with self._changed:
            self._accepting = False
            if self.state in ("warming", "ready"):
                self.state = "draining"
        await asyncio.to_thread(self._finish_all, seconds)

    def stats(self) -> EngineStats:
        """A snapshot."""
        running = self._scheduler.running
        return EngineStats(
            running=running,
            waiting=max(0, len(self._live) - running),
            kv_tokens_used=self._cache.tokens,
            kv_tokens_total=self.settings.slots * self.settings.max_len,
            kv_bytes=self._runner.entries * self.settings.slots * sum(bytes_per_token(self._target, self._draft)),
            prefix_queries_total=self._cache.queries,
            prefix_hits_total=self._cache.hits,
        )

    def _submit(self, request: Request, deliver: Callable[[Delta], None]) -> Sequence:
        params, settings = spread(request.params, 1)[0], self.settings
        request = replace(request, params=params)  # with a seed of its own if it had none
        room = min(params.max_new_tokens, settings.max_len - len(request.prompt))
        strategy = self._strategies.of(request)
        sequence = Sequence(request, strategy, params.stops(self._target), room, deliver)
        with self._changed:
            if not self._accepting:
                raise EngineStopped(self.error or "the server is shutting down / ask another one")
            if len(self._live) >= settings.slots + settings.queue:
                raise QueueFull(max(1.0, self._seconds * (1 + settings.queue / settings.slots) / 2))
            if request.request_id in self._live:
                raise UserError(f"request id {request.request_id!r} is in use / give each request its own")
            self._strategies.add(strategy)
            self._live[request.request_id] = sequence
            self._inbox.append(sequence)
            self._changed.notify_all()
        return sequence

    def _cancel(self, sequence: Sequence) -> None:
        with self._changed:
            sequence.cancelled = True
            self._changed.notify_all()

    def _finish_all(self, seconds: float | int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._live, timeout=seconds)
            for sequence in self._live.values():
                sequence.cancelled = True
            self._leave = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_LAST_STEP)
        for sequence in self._forget_all():
            _tell(sequence, Delta((), (), finish_reason="cancelled"))

    def _forget_all(self) -> list[Sequence]:
        """The requests that are left, which nobody is going to run."""
        with self._changed:
            left, self._inbox = list(self._live.values()), []
            self._live.clear()
            self._changed.notify_all()
        return left

    # The thread.

    def _run(self) -> None:
        try:
            self._runner.warm_up()
            with self._changed:
                if self.state == "warming":
                    self.state = "ready"
            while self._take_inbox():
                self._step()
            self.state = "stopped"
        except BaseException as error:  # whatever it is, the callers must hear of it
            _log.exception("the engine died")
            self.error = f"the engine died: {type(error).__name__}: {error}"
            self.state = "dead"
        with self._changed:
            self._accepting = False
        for sequence in self._forget_all():
            _tell(sequence, Delta((), (), finish_reason="error", error=self.error))

    def _take_inbox(self) -> bool:
        """Waits until there is something to do; False if that is to leave."""
        with self._changed:
            self._changed.wait_for(lambda: self._live or self._leave)
            self._scheduler.waiting.extend(self._inbox)
            self._inbox.clear()
            return bool(self._live) or not self._leave

    def _step(self) -> None:
        now = time.monotonic()
        for sequence in self._scheduler:
            if sequence.cancelled:
                self._end(sequence, "cancelled")
            elif sequence.request.deadline is not None and now >= sequence.request.deadline:
                self._end(sequence, "deadline")
        for sequence, place in self._scheduler.admit():
            self._steady = None
            self._begin(sequence, place, now)
        match self._scheduler.next():
            case Chunk() as chunk:
                self._steady = None
                self._read(chunk)
            case Round() as round_:
                self._round(round_)

    def _begin(self, sequence: Sequence, place: Place, now: float) -> None:
        request, row = sequence.request, place.slot.row
        sequence.began = now
        if place.copy_from is not None:
            self._runner.copy(place.copy_from, row)
        unusual = self._runner.set_sampling(row, request.prompt, request.params)
        sequence.everything = unusual or request.logprobs is not None or request.grammar is not None
        if request.grammar is not None:
            sequence.bias = bias_row(request.params.logit_bias, self._target.config.vocab_size)

    def _read(self, chunk: Chunk) -> None:
        sequence, slot, prompt = chunk.sequence, chunk.sequence.slot, chunk.sequence.request.prompt
        last = self._runner.read(slot.row, prompt, chunk.start, chunk.stop, sequence.room)
        slot.read = chunk.stop
        slot.draft_read = min(chunk.stop, len(prompt) - 1)  # the newest entry waits for the token after it
        if slot.read == len(prompt) and self._masked(sequence):
            outcome = self._runner.first(slot.row, last, len(prompt), sequence.request.logprobs is not None)
            self._scheduler.prompt_read(sequence)
            self._commit(sequence, outcome, 0, "plain", accepted=None)

    def _round(self, round_: Round) -> None:
        sequences = [sequence for sequence in round_.sequences if self._masked(sequence)]
        if not sequences:
            return
        size = self._runner.bucket(len(sequences))
        strategy = self._chosen(round_.strategy, size)
        scored = [sequence.request.logprobs is not None for sequence in sequences]
        everything = any(sequence.everything for sequence in sequences)
        try:
            outcome, seconds = self._runner.round(strategy, [s.slot.row for s in sequences], scored, everything)
        except Exception as error:  # the compiler's, or no memory
            if strategy.text in self._strategies.at_start or not self._runner.intact:
                raise
            self._give_up(strategy, error)
            return
        accepted = outcome.accepted[: len(sequences)].tolist()
        if round_.strategy == AUTO:
            self._controller.observe(strategy, accepted)
            self._runner.costs[size].ran(strategy, seconds if size == self._steady else None)
            self._steady = size
        for i, sequence in enumerate(sequences):
            self._commit(sequence, outcome, i, strategy.text, accepted[i])

    def _chosen(self, name: str, size: int) -> Strategy:
        return self._controller.next(self._runner.costs[size]) if name == AUTO else parse_strategy(name)

    def _give_up(self, strategy: Strategy, error: Exception) -> None:
        """Ends all requests of a strategy that only requests named and that cannot be run."""
        _log.warning("strategy given up", extra={"facts": {"strategy": strategy.text}}, exc_info=error)
        words = " ".join(f"{type(error).__name__}: {error}".split())
        reason = f"it cannot be run here: {words[:300]}"
        self._strategies.give_up(strategy.text, reason)
        for sequence in self._scheduler:
            if sequence.strategy == strategy.text:
                self._end(sequence, "error", f"strategy {strategy.text} / {reason}")

    def _commit(self, sequence: Sequence, outcome: Outcome, i: int, strategy: str, accepted: int | None) -> None:
        """Takes row i of an outcome into a request's answer and tells the caller."""
        if not outcome.sound[i]:
            self._end(sequence, "error", "the target's logits are not finite")
            return
        block = outcome.tokens[i, : (accepted or 0) + 1].tolist()
        kept, reason = cut(block, sequence.room - len(sequence.tokens), sequence.stops)
        shown = len(kept) - (reason == "stop")
        depths = tuple(j + 1 if j < (accepted or 0) else 0 for j in range(shown))
        try:
            self._advance(sequence, kept, reason)
        except Exception as error:  # a grammar is foreign code
            self._end(sequence, "error", f"the grammar failed: {error}")
            return
        sequence.tokens += kept
        sequence.slot.commit(kept, self._runner.draft_lag(sequence.slot.row))
        logprobs = None
        if sequence.request.logprobs is not None:
            logprobs = tuple(_logprobs(outcome, i, j, sequence.request.logprobs) for j in range(shown))
        if reason is not None:
            self._remove(sequence, reason)
        finite = bool(outcome.finite[i])
        _tell(sequence, Delta(tuple(kept[:shown]), depths, accepted, strategy, logprobs, reason, finite=finite))

    def _masked(self, sequence: Sequence) -> bool:
        """Puts the grammar's mask, if any, on the next token; False if that failed, which ends the request."""
        grammar = sequence.request.grammar
        if grammar is None:
            return True
        try:
            sequence.allowed = np.asarray(grammar.mask())
            if not sequence.allowed.any():
                raise ValueError("it allows no token")
            bias = np.where(sequence.allowed, sequence.bias, np.float32(-np.inf))
        except Exception as error:  # a grammar is foreign code
            self._end(sequence, "error", f"the grammar failed: {error}")
            return False
        self._runner.set_bias(sequence.slot.row, bias)
        return True

    def _advance(self, sequence: Sequence, kept: list[int], reason: str | None) -> None:
        grammar = sequence.request.grammar
        if grammar is None:
            return
        for token in kept:
            if not sequence.allowed[token]:
                raise ValueError("every token it allows is forbidden by the sampling settings")
            if reason != "stop":
                grammar.advance(token)

    def _end(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        """Ends a request between two rounds."""
        self._remove(sequence, reason)
        _tell(sequence, Delta((), (), finish_reason=reason, error=error))

    def _remove(self, sequence: Sequence, reason: str) -> None:
        if reason == "error" and sequence.slot is not None:
            sequence.slot.forget()
        self._scheduler.remove(sequence)
        if sequence.began:
            self._seconds += 0.1 * (time.monotonic() - sequence.began - self._seconds)
        with self._changed:
            self._live.pop(sequence.request.request_id, None)  # gone already if a drain has given up waiting
            self._changed.notify_all()


def _logprobs(outcome: Outcome, i: int, j: int, count: int) -> TokenLogprobs:
    top = zip(outcome.scores.top_ids[i, j, :count], outcome.scores.top_logprobs[i, j, :count], strict=True)
    return TokenLogprobs(float(outcome.scores.logprob[i, j]), tuple((int(token), float(p)) for token, p in top))


def _tell(sequence: Sequence, delta: Delta) -> None:
    try:
        sequence.deliver(delta)
    except RuntimeError:  # the caller's event loop is closed: nobody is there to be told
        sequence.cancelled = True
