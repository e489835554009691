"""What the server counts equals what it sent: metrics, their names and labels, and the log line of each request."""

import asyncio
import dataclasses
import io
import json
import logging
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eagle3_jax.serving.logs import JsonLines
from eagle3_jax.serving.metrics import Metrics
from eagle3_jax.serving.observed import Observed
from eagle3_jax.serving.requests import Delta, QueueFull, Request
from eagle3_jax.speculate.request import SamplingParams

LABELS = {"model_name": "tiny", "engine": "0"}
ANSWER = (
    Delta((5,), (0,)),
    Delta((6, 7, 8), (1, 2, 0), 2, "chain:3"),
    Delta((), (), 3, "chain:3"),  # all held back by the end of the answer
    Delta((9,), (0,), 0, "tree:2x2x4"),
    Delta((4,), (0,), 0, "plain", finish_reason="length"),
)


@dataclasses.dataclass
class Scripted:
    """An engine that streams `deltas`, then raises `error` if there is one."""

    deltas: tuple[Delta, ...]
    error: Exception | None = None
    closed: int = 0

    async def stream(self, request):
        try:
            for delta in self.deltas:
                await asyncio.sleep(0)
                yield delta
            if self.error:
                raise self.error
        finally:
            self.closed += 1

    def stats(self):
        counts = {"prefix_queries_total": 30, "prefix_hits_total": 12}
        return SimpleNamespace(running=2, waiting=5, kv_tokens_used=64, kv_tokens_total=256, **counts)


def run(engine: Scripted, requests: int = 1, leave_after: int | None = None, left_for=None) -> dict[str, float]:
    """Reads `requests` streams through the counted engine; returns the metrics as Prometheus would read them."""
    metrics = Metrics(engine, "tiny")
    observed = Observed(engine, metrics)

    async def read(number: int) -> None:
        request = Request(f"r{number}", (1, 2, 3), SamplingParams())
        stream = observed.stream(request) if left_for is None else observed.stream(request, lambda: left_for)
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == leave_after:
                await stream.aclose()

    async def read_all() -> None:
        await asyncio.gather(*map(read, range(requests)))

    if engine.error is None:
        asyncio.run(read_all())
    else:
        with pytest.raises(type(engine.error)):
            asyncio.run(read_all())
    return scraped(metrics)


def scraped(metrics: Metrics) -> dict[str, float]:
    """{name, or name and the value of its third label: value}; checks the common labels."""
    text, kind = metrics.render()
    assert kind.startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            assert LABELS.items() <= sample.labels.items()
            extra = [value for key, value in sample.labels.items() if key not in LABELS]
            values[" ".join([sample.name.removeprefix("eagle3:"), *extra])] = sample.value
    return values


@pytest.fixture
def lines():
    """The log of the test, parsed when called."""
    stream, logger = io.StringIO(), logging.getLogger("eagle3_jax.serving")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)


def test_totals_are_what_was_streamed(lines):
    engine = Scripted(ANSWER)
    got = run(engine, requests=3)
    expected = {
        "spec_decode_num_drafts_total": 3 * 3,  # plain rounds draft nothing
        "spec_decode_num_draft_tokens_total": 3 * (3 + 3 + 3),
        "spec_decode_num_accepted_tokens_total": 3 * (2 + 3 + 0),
        "spec_decode_num_accepted_tokens_per_pos_total 0": 3 * 2,
        "spec_decode_num_accepted_tokens_per_pos_total 1": 3 * 2,
        "spec_decode_num_accepted_tokens_per_pos_total 2": 3 * 1,
        "prompt_tokens_total": 3 * 3,
        "generation_tokens_total": 3 * 6,
        "time_to_first_token_seconds_count": 3,
        "inter_token_latency_seconds_count": 3 * 3,  # steps that brought tokens, after the first
        "request_time_per_output_token_seconds_count": 3,
        "e2e_request_latency_seconds_count": 3,
        "request_success_total length": 3,
        "request_success_total stop": 0,
        "request_success_total abort": 0,
        "request_success_total error": 0,
    }
    assert {name: got[name] for name in expected} == expected
    assert engine.closed == 3
    line = next(line for line in lines() if line["request_id"] == "r1")
    assert line["event"] == "request finished" and line["finish_reason"] == "length" and line["level"] == "info"
    assert (line["prompt_tokens"], line["tokens"], line["tau"]) == (3, 6, round(1 + 5 / 4, 3))
    assert 0 <= line["first_token_ms"] <= line["ms"] and "error" not in line


def test_the_engine_s_own_state():
    got = run(Scripted(ANSWER))
    assert (got["num_requests_running"], got["num_requests_waiting"], got["kv_cache_usage_perc"]) == (2, 5, 0.25)
    assert (got["prefix_cache_queries_total"], got["prefix_cache_hits_total"]) == (30, 12)


def test_drafts_that_are_not_finite_are_counted_each_time_and_told_once(lines):
    bad = [dataclasses.replace(delta, finite=delta.accepted is None) for delta in ANSWER]
    got = run(Scripted(tuple(bad)), requests=2)
    assert got["spec_decode_num_nonfinite_drafts_total"] == got["spec_decode_num_drafts_total"] == 2 * 3
    told = [line for line in lines() if "not finite" in line["event"]]
    assert len(told) == 1 and told[0]["level"] == "warning" and told[0]["strategy"] == "chain:3"
    assert run(Scripted(ANSWER))["spec_decode_num_nonfinite_drafts_total"] == 0


@pytest.mark.parametrize(
    ("left_for", "counted"), [(None, "request_success_total abort"), ("stop", "request_success_total stop")]
)
def test_leaving_early_ends_the_engine_s_stream(left_for, counted, lines):
    engine = Scripted(ANSWER)
    got = run(engine, leave_after=2, left_for=left_for)
    assert engine.closed == 1 and got[counted] == 1 and got["generation_tokens_total"] == 4
    assert lines()[0]["finish_reason"] == (left_for or "cancelled")


def test_reasons_of_the_engine():
    for reason, counted in (("deadline", "abort"), ("cancelled", "abort"), ("error", "error")):
        got = run(Scripted((*ANSWER[:2], Delta((), (), finish_reason=reason, error="NaN logits"))))
        assert got[f"request_success_total {counted}"] == 1


def test_an_engine_that_fails_in_the_middle(lines):
    got = run(Scripted(ANSWER[:2], RuntimeError("boom")))
    assert got["request_success_total error"] == 1
    assert lines()[0]["error"] == "RuntimeError: boom" and lines()[0]["level"] == "warning"


def test_a_refused_request_is_logged_and_not_counted_as_finished(lines):
    got = run(Scripted((), QueueFull(3.0)))
    assert sum(value for name, value in got.items() if name.startswith("request_success_total")) == 0
    assert lines()[0]["event"] == "request refused" and lines()[0]["error"].startswith("QueueFull")


def test_two_servers_in_a_process_count_apart():
    one, two = Metrics(Scripted(()), "tiny"), Metrics(Scripted(()), "tiny")
    one.finished("stop", 3, 1.0, 0.5)
    assert scraped(one)["request_success_total stop"] == 1 and scraped(two)["request_success_total stop"] == 0
