"""`eagle3 serve`: what is said at start, and what is refused. The server itself: tests/serving."""

import re

import pytest

from eagle3_jax.cli.serve import parse_memory
from eagle3_jax.draft.draft import save_draft
from eagle3_jax.errors import UserError
from eagle3_jax.serving.api.server import Server, listen
from eagle3_jax.serving.engine import Engine
from tests.tiny import random_draft


@pytest.fixture
def served(monkeypatch):
    """The servers that would have been run."""
    servers = []

    def run_on(self, listener):
        listener.close()
        servers.append(self)
        return 0

    monkeypatch.setattr(Server, "run_on", run_on)
    monkeypatch.setattr(Engine, "start", lambda self: None)
    monkeypatch.setattr("eagle3_jax.serving.logs.log_json", lambda: None)  # it would take the log from other tests
    return servers


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory):
    import eagle3_jax as e3

    folder = tmp_path_factory.mktemp("drafts") / "draft"
    made = random_draft(e3.load_target(target, dtype="float32"), taps=(0, 1, 2), d2t=range(8))
    made.facts["verifier"] = {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    made.facts["training"] = {"chat_template": {"enable_thinking": False}}
    save_draft(made, folder)
    return folder


def test_a_draft_alone_is_enough(eagle3, served, draft, target):
    outcome = eagle3(
        "serve", "--draft", draft, "--port", 0, "--dtype", "float32", "--slots", 2, "--strategies", "chain:1"
    )
    assert outcome.code == 0 and outcome.out == "", outcome
    for said in (
        f"target {target}, named by the draft",
        "draft taps [embedding, block 1 input, tap 2 = last block output before the final norm]",
        "2 slots of 256 tokens: ",
        f"(model {target.name})",
        "chain:1",
        "chats are rendered with enable_thinking=False, as in the draft's training",
    ):
        assert said in outcome.err, outcome.err
    service = served[0].config.app.state.service
    assert (service.model, service.max_len, service.most_requests) == (target.name, 256, 2 + 64)
    assert service.engine.settings.strategies == ("chain:1",)
    assert service.template == {"enable_thinking": False}


def test_suggestions_of_the_model_are_told_and_memory_makes_slots(eagle3, served, target):
    suggestions = target / "generation_config.json"
    suggestions.write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 1}')
    try:
        memory = ["--memory", "4M", "--max-len", 128, "--api-key", "k"]
        outcome = eagle3("serve", "--target", target, "--port", 0, "--dtype", "float32", *memory)
        assert "suggests temperature 0.6, top_k 20" in outcome.err and "no draft: plain decoding" in outcome.err
        slots, size = re.search(r"(\d+) slots of 128 tokens: (\d+) MiB", outcome.err).groups()
        assert int(slots) > 1 and int(size) in (3, 4)
        too_many = eagle3("serve", "--target", target, "--port", 0, "--slots", 10**6, *memory)
        assert "lower one of them" in too_many.err and too_many.code == 2
    finally:
        suggestions.unlink()


def test_a_server_that_others_reach_is_warned_about(eagle3, served, target):
    told = eagle3("serve", "--target", target, "--port", 0, "--host", "0.0.0.0", "--dtype", "float32").err
    assert "warning: anyone who reaches 0.0.0.0" in told
    closed = ("--host", "0.0.0.0", "--api-key", "k", "--dtype", "float32")
    assert "anyone" not in eagle3("serve", "--target", target, "--port", 0, *closed).err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--target is missing"),
        (("--target", "nowhere"), "no such model"),
        (("--target", "x", "--strategy", "chain:2"), "needs a draft"),
        (("--target", "x", "--strategies", "plain,chain:0"), "is not known"),
        (("--target", "x", "--memory", "lots"), "--memory lots"),
        (("--target", "x", "--api-key", ""), "--api-key"),
        (("--target", "x", "--api-key", "schlüssel"), "--api-key"),
        (("--target", "x", "--port", "70000"), "port"),
        (("--target", "x", "--max-body-mb", "inf"), "--max-body-mb"),
        (("--target", "x", "--host", "nowhere.invalid"), "cannot listen on nowhere.invalid"),
    ],
)
def test_bad_input_is_one_line(eagle3, arguments, said):
    assert said in eagle3("serve", *(arguments if "--port" in arguments else (*arguments, "--port", 0))).complaint


def test_a_port_in_use_is_said_before_anything_is_loaded(eagle3):
    with listen("127.0.0.1", 0) as taken:
        complaint = eagle3("serve", "--target", "x", "--port", taken.getsockname()[1]).complaint
    assert "Address already in use / choose another --host or --port" in complaint


def test_memory():
    sizes = {"1024": 1024, "2k": 2048, "1.5G": 3 * 2**29, "512MiB": 2**29, "1 T": 2**40}
    assert {text: parse_memory(text) for text in sizes} == sizes
    for wrong in ("", "-1", "1X", "G", "1e9"):
        with pytest.raises(UserError, match="--memory"):
            parse_memory(wrong)
