"""The demo's stages on a tiny target: the keys of its result, and that a second call shows the finished one."""

import json
from pathlib import Path

import pytest

from eagle3_jax.bench import demo
from eagle3_jax.config import Config
from eagle3_jax.data.records import read_prompts
from eagle3_jax.data.template import prompt_ids
from tests.cli.tiny_target import write_tiny_target


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("demo")
    rows = [{"input_ids": [0, *range(2, 2 + n), 3, 4, 5, 1], "loss_mask": [0] * (1 + n) + [1] * 4} for n in (4, 6, 9)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config.model_validate(
        {
            "name": "demo",
            "runs_dir": str(folder / "runs"),
            "target": {"path": str(write_tiny_target(folder / "target")), "dtype": "float32"},
            "data": {"train": str(folder / "rows.jsonl"), "heldout": str(folder / "rows.jsonl"), "length": 32},
            "draft": {"taps": [0, 1, 2], "vocab_size": 16},
            "training": {"epochs": 1, "ttt_steps": 1, "batch_rows": 2, "evaluate_steps": 1, "compute_dtype": "float32"},
        }
    )


def test_result_has_the_documented_keys_and_is_shown_again(config, monkeypatch):
    def prompts(target, count):
        return [prompt_ids(target.tokenizer, [{"role": "user", "content": text}]) for text in ("what", "who is it")]

    monkeypatch.setattr(demo, "heldout_prompts", prompts)
    monkeypatch.setattr(demo, "STRATEGIES", ("chain:1",))
    said = []
    size = demo.DemoSize(prompts=2, tokens=6, identity_tokens=4)
    result = demo.run_demo(config, size, lambda report: None, said.append)
    documented = "plain_tok_s spec_tok_s speedup tau simulated_tau identical identical_bf16"
    assert set(documented.split()) <= set(result)
    assert result["identical"] is True and result["tau"] >= 1.0
    assert json.loads((config.run_dir / "result.json").read_text()) == result
    assert [cells[0] for cells in demo.table(result)] == ["strategy", "plain", "chain:1"]
    assert (config.run_dir / "export" / "config.json").exists()

    monkeypatch.setattr(demo, "load_target", None)  # a finished result needs no model
    assert demo.run_demo(config, size, lambda report: None, said.append) == result
    assert "already done" in said[-1]


def test_held_out_and_training_prompts_are_disjoint():
    folder = Path(demo.__file__).parent / "demo_prompts"
    train, heldout = ({turns[0] for turns in read_prompts(folder / name)} for name in ("train.jsonl", "heldout.jsonl"))
    assert len(train) == 400 and len(heldout) == 48 and not train & heldout
