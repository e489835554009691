"""Prometheus metrics of a server, under vLLM's names with `eagle3:` in place of `vllm:`, so that its dashboards carry
over: same meaning, units, labels and buckets (vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py).

What happened is counted as the engine's stream brings it (`serving/observed.py` calls `token_step` and `finished`);
what is, now, is read from `engine.stats()` when somebody asks. tau over a window is
`1 + rate(eagle3:spec_decode_num_accepted_tokens_total) / rate(eagle3:spec_decode_num_drafts_total)`, the acceptance at
a depth `rate(eagle3:spec_decode_num_accepted_tokens_per_pos_total{position="0"}) / rate(..._num_drafts_total)`.
"""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from eagle3_jax.serving.requests import Delta
from eagle3_jax.speculate.strategy import parse_strategy

_LABELS = ("model_name", "engine")
_ENGINE = "0"  # one process has one engine
_FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "deadline": "abort", "error": "error"}
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_FIRST_TOKEN += (640, 2560)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


@runtime_checkable
class HasStats(Protocol):
    """An engine, as far as metrics read it."""

    def stats(self) -> Any: ...


class Metrics:
    """The counters and histograms of one server, in a registry of its own."""

    def __init__(self, engine: HasStats, model_name: str):
        self.registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": _ENGINE}

        def counter(name: str, documentation: str) -> Counter:
            return Counter(f"eagle3:{name}", documentation, _LABELS, registry=self.registry).labels(**labels)

        def histogram(name: str, documentation: str, buckets: tuple[int | float, ...]) -> Histogram:
            family = Histogram(f"eagle3:{name}", documentation, _LABELS, registry=self.registry, buckets=buckets)
            return family.labels(**labels)

        def labelled(name: str, documentation: str, label: str) -> Counter:
            return Counter(f"eagle3:{name}", documentation, (*_LABELS, label), registry=self.registry)

        self._labels = labels
        self._drafts = counter("spec_decode_num_drafts", "Number of spec decoding drafts.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Number of draft tokens.")
        self._nonfinite = counter(
            "spec_decode_num_nonfinite_drafts", "Number of drafts whose logits held NaN or infinities."
        )
        self._accepted = counter("spec_decode_num_accepted_tokens", "Number of accepted tokens.")
        self._accepted_at = labelled(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens per draft position (0 is depth 1).", "position"
        )
        self._prompt_tokens = counter("prompt_tokens", "Number of prefill tokens processed.")
        self._generated = counter("generation_tokens", "Number of generation tokens processed.")
        self._first = histogram(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.", _FIRST_TOKEN
        )
        self._step = histogram(
            "inter_token_latency_seconds",
            "Histogram of time between steps that bring a request tokens, in seconds.",
            _PER_TOKEN,
        )
        self._mean = histogram(
            "request_time_per_output_token_seconds",
            "Histogram of a request's mean time per token after the first, in seconds.",
            _PER_TOKEN,
        )
        self._whole = histogram("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _REQUEST)
        self._success = labelled("request_success", "Count of finished requests.", "finished_reason")
        for reason in sorted(set(_FINISHED.values())):
            self._success.labels(**labels, finished_reason=reason)
        self.registry.register(_EngineState(engine, labels))

    def token_step(self, delta: Delta, prompt_tokens: int, since_arrival: float, since_last: float | None) -> None:
        """Counts one Delta. Seconds since the request arrived, and since its last token (None: it had none yet)."""
        if delta.tokens:
            self._generated.inc(len(delta.tokens))
            if since_last is None:
                self._prompt_tokens.inc(prompt_tokens)
                self._first.observe(since_arrival)
            else:
                self._step.observe(since_last)
        strategy = parse_strategy(delta.strategy)
        if delta.accepted is not None and strategy.depth:
            self._drafts.inc()
            self._draft_tokens.inc(strategy.nodes - 1)
            self._accepted.inc(delta.accepted)
            self._nonfinite.inc(not delta.finite)
            for position in range(strategy.depth):  # those that were never right show as 0
                self._accepted_at.labels(**self._labels, position=str(position)).inc(position < delta.accepted)

    def finished(self, reason: str, tokens: int, seconds: float, first_token: float | None) -> None:
        """Counts one request that has ended. reason: a Delta's finish_reason. Seconds from its arrival to its end, and
        to its first token (None: it had none)."""
        self._success.labels(**self._labels, finished_reason=_FINISHED[reason]).inc()
        self._whole.observe(seconds)
        if first_token is not None and tokens > 1:
            self._mean.observe((seconds - first_token) / (tokens - 1))

    def render(self) -> tuple[bytes, str]:
        """The text that Prometheus scrapes, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class _EngineState(Collector):
    """What the engine knows best, read when asked for."""

    def __init__(self, engine: HasStats, labels: dict[str, str]):
        self._engine, self._labels = engine, labels

    def collect(self) -> Iterator[Metric]:
        stats, values = self._engine.stats(), list(self._labels.values())
        usage = stats.kv_tokens_used / stats.kv_tokens_total if stats.kv_tokens_total else 0.0
        for name, documentation, value in (
            ("num_requests_running", "Number of requests in model execution batches.", stats.running),
            ("num_requests_waiting", "Number of requests waiting to be processed.", stats.waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage),
        ):
            gauge = GaugeMetricFamily(f"eagle3:{name}", documentation, labels=_LABELS)
            gauge.add_metric(values, value)
            yield gauge
        for name, documentation, value in (
            (
                "prefix_cache_queries",
                "Prefix cache queries, in terms of number of queried tokens.",
                "prefix_queries_total",
            ),
            ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", "prefix_hits_total"),
        ):
            total = CounterMetricFamily(f"eagle3:{name}", documentation, labels=_LABELS)
            total.add_metric(values, getattr(stats, value))
            yield total
