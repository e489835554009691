"""`bench/gpu.py` at a tiny shape on CPU: its rows, forced acceptance, runs that are cut or fail, bad options."""

import itertools
import json

import jax
import pytest

from bench import gpu
from eagle3_jax.bench.random_pair import SHAPES, parameter_count, random_pair, shape_config, target_shapes

FAST = ("--rows", "3", "--depth", "2", "--context", "16")


def test_rows_say_what_was_measured(tmp_path, capsys):
    file = tmp_path / "gpu.json"
    assert gpu.main(["--shape", "tiny", "--batch", "2", *FAST, "--seconds", "1000", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["complete"] and not report["failed"] and list(tmp_path.iterdir()) == [file]
    plain, draft, block, chain = rows = report["rows"]
    names = [(r["what"], r["rows"]) for r in rows]
    assert names == [("plain", 1), ("draft step", 1), ("verify", 3), ("chain:2", 3)]
    assert (plain["tau"], chain["tau"]) == (1.0, 3.0)  # every draft token is accepted
    assert chain["speedup"] == pytest.approx(3 * plain["fetched_ms"] / chain["fetched_ms"])
    assert chain["tok_s"] == pytest.approx(2 * 3 * 1000 / chain["fetched_ms"])
    assert chain["bound"] == pytest.approx(3 / (block["vs_plain"] + 2 * draft["vs_plain"]))
    assert block["vs_plain"] == pytest.approx(block["ms"] / plain["ms"])
    assert plain["floor_ms"] == pytest.approx(report["target_gb"] / report["copy_gb_s"] * 1000)
    # 16 tokens of 2 sequences, 7 layers, keys and values of 2 heads of 16, 2 bytes each
    assert plain["kv_ms"] == pytest.approx(16 * 2 * 7 * 2 * 2 * 16 * 2 / report["copy_gb_s"] / 1e6)
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.split()[:2] == ["2", "verify"] for line in shown) == 1


def test_the_token_is_forced_with_tied_embeddings_too():
    pair = random_pair("tiny-tied")
    case = next(c for c in gpu.cases(pair, 1, [3], 2, 16) if c.what == "verify")
    _, (choices, _) = case.program.compile()(case.weights, gpu.filled(case.carry, 16))
    assert choices.tolist() == [[28, 28, 28]]  # what draft token 7 stands for: every fourth token is in its vocabulary


def test_a_cut_run_tells_so(tmp_path, capsys):
    file = tmp_path / "gpu.json"
    assert gpu.main(["--shape", "tiny", "--batch", "2,4", *FAST, "--seconds", "0", "--json", str(file)]) == 1
    report = json.loads(file.read_text())
    assert report["rows"] == [] and report["complete"] is False
    assert "incomplete: 0 of 8 rows" in capsys.readouterr().out


def test_a_failing_program_is_told_and_costs_only_its_row(tmp_path, monkeypatch, capsys):
    measured = iter([gpu.Timing(1.0, 1.5, 1.0), None, gpu.Timing(2.0, None, None)])
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda program: program)  # none of them is called

    def time_calls(*arguments):
        if (timing := next(measured)) is None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")
        return timing

    def first_cases(*arguments, cases=gpu.cases):
        return itertools.islice(cases(*arguments), 3)

    monkeypatch.setattr(gpu, "time_calls", time_calls)
    monkeypatch.setattr(gpu, "cases", first_cases)
    file = tmp_path / "gpu.json"
    assert gpu.main(["--shape", "tiny", "--batch", "2", *FAST, "--seconds", "1000", "--json", str(file)]) == 1
    report = json.loads(file.read_text())
    assert [(r["what"], r["vs_plain"]) for r in report["rows"]] == [("plain", 1.0), ("verify", 2.0)]
    assert [f["what"] for f in report["failed"]] == ["draft step"] and report["complete"] is False
    assert "batch 2 draft step 1 failed: RESOURCE_EXHAUSTED: out of memory\n" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    (folder := tmp_path / "gpu.json").mkdir()
    monkeypatch.setattr(gpu, "measure", lambda options, say, save: save({"rows": []}))
    assert gpu.main(["--json", str(folder)]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("gpu.py: --json: cannot write the report") and complaint.count("\n") == 1
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--batch", "1,0"], "'0' is not a whole number above 0"),
        (["--rows", ""], "'' is not a whole number above 0"),
        (["--depth", "99"], "chain:99"),
        (["--shape", "gpt-2"], "invalid choice"),
        (["--json", "no/such/folder/f.json"], "no folder no/such/folder"),
    ],
)
def test_bad_options_exit_2(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu.main(arguments)
    assert stopped.value.code == 2 and complaint in capsys.readouterr().err


def test_shapes_are_those_of_the_models():
    counts = {name: parameter_count(target_shapes(shape_config(name))[1]) for name in SHAPES}
    assert counts["llama-3.1-8b"] == 8_030_261_248 and counts["llama-3.2-1b"] == 1_235_814_400
