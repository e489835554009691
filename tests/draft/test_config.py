"""The draft's config.json in speculators layout: reading, writing, and what is refused."""

import json

import pytest

from eagle3_jax.draft.config import DraftConfig, draft_config_from_speculators, draft_config_to_speculators
from eagle3_jax.errors import UserError
from eagle3_jax.models.config import decoder_config
from eagle3_jax.taps import TapSet, WiringError
from tests.tiny import target_config

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def config(taps=(2, 4, 6), width: int = 64, **flags: bool) -> DraftConfig:
    return DraftConfig(decoder_config(target_config(num_hidden_layers=1)), TapSet(taps), 128, width, **flags)


def written(given: DraftConfig, **own) -> dict:
    raw = draft_config_to_speculators(given, "float32", 3, {"name_or_path": "org/name", "architectures": ["X"]}, own)
    return json.loads(json.dumps(raw))


@pytest.mark.parametrize("taps", [[2, 4, 6], [6, 2], [0, 8, 3, 5]])
@pytest.mark.parametrize("flag", [None, *FLAGS])
def test_writing_and_reading_are_inverse(taps: list[int], flag: str | None) -> None:
    given = config(taps, **({flag: True} if flag else {}))
    assert draft_config_from_speculators(written(given), "here") == given


def test_a_narrower_target_is_written() -> None:
    assert written(config(width=32))["target_hidden_size"] == 32
    assert draft_config_from_speculators(written(config(width=32)), "here") == config(width=32)


def test_taps_are_stated_twice_with_their_convention() -> None:
    raw = written(config(), training={"steps": 5})
    assert raw["eagle_aux_hidden_state_layer_ids"] == raw["eagle3_jax"]["taps"] == [2, 4, 6]
    assert raw["eagle3_jax"]["taps_convention"] == "block-input" and raw["eagle3_jax"]["training"] == {"steps": 5}


def test_keys_that_servers_read() -> None:
    raw = written(config(norm_output=True))
    assert (raw["speculators_model_type"], raw["draft_vocab_size"], raw["norm_output"]) == ("eagle3", 128, True)
    assert raw["norm_before_residual"] is False  # written out: readers differ in what an absent key means
    proposal = raw["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == 3 and proposal["proposal_type"] == "greedy"
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "org/name"
    assert raw["transformer_layer_config"]["num_hidden_layers"] == 1


def test_a_window_that_a_file_leaves_out_is_that_of_its_class() -> None:
    raw = written(config())
    raw["transformer_layer_config"] |= {"model_type": "qwen3", "use_sliding_window": True}
    assert draft_config_from_speculators(raw, "here").decoder.windows == ()  # from layer 28 on
    raw["transformer_layer_config"]["layer_types"] = ["sliding_attention"]
    assert draft_config_from_speculators(raw, "here").decoder.windows == (4096,)


def test_missing_taps_are_refused_unless_given() -> None:
    raw = written(config())
    raw["eagle_aux_hidden_state_layer_ids"] = None
    assert draft_config_from_speculators(raw, "here").taps == config().taps  # our own block still names them
    del raw["eagle3_jax"]
    with pytest.raises(WiringError, match="does not say which target layers.*--taps"):
        draft_config_from_speculators(raw, "here")
    assert draft_config_from_speculators(raw, "here", TapSet([6, 4, 2])).taps == TapSet([6, 4, 2])


@pytest.mark.parametrize("given", [[4, 2, 6], [3, 5, 7], [2, 4], [2, 4, 6, 7]])
def test_contradicting_the_file_is_refused(given: list[int]) -> None:
    assert draft_config_from_speculators(written(config()), "here", TapSet([2, 4, 6])) == config()
    with pytest.raises(WiringError, match="expected .*, got "):
        draft_config_from_speculators(written(config()), "here", TapSet(given))


def test_a_file_that_contradicts_itself_is_refused() -> None:
    raw = written(config())
    raw["eagle3_jax"]["taps"] = [3, 5, 7]
    with pytest.raises(WiringError, match=r"expected \[block 2 input.*got \[block 3 input"):
        draft_config_from_speculators(raw, "here")


def test_another_numbering_of_taps_is_refused() -> None:
    raw = written(config())
    raw["eagle3_jax"]["taps_convention"] = "block-output"
    with pytest.raises(WiringError, match="'block-output'; only block-input"):
        draft_config_from_speculators(raw, "here")
    raw = written(config())
    raw["eagle_aux_hidden_state_layer_ids"] = 2
    with pytest.raises(WiringError, match="must be a list"):
        draft_config_from_speculators(raw, "here")


@pytest.mark.parametrize("ids", [[], [2, 2, 4], [-1, 2]])
def test_impossible_taps_in_a_file_are_refused(ids: list[int]) -> None:
    raw = written(config())
    raw["eagle_aux_hidden_state_layer_ids"] = ids
    with pytest.raises(WiringError):
        draft_config_from_speculators(raw, "here")


def test_two_norms_of_the_features_exclude_each_other() -> None:
    with pytest.raises(UserError, match="norm_before_fc and fc_norm are both on"):
        config(norm_before_fc=True, fc_norm=True)


def test_flags_that_are_not_understood_are_refused() -> None:
    raw = written(config()) | {"mask_token_id": 5, "unused": None, "off": False}
    with pytest.raises(UserError, match="not understood: mask_token_id /"):
        draft_config_from_speculators(raw, "here")


def test_a_rotation_that_changes_within_a_text_is_refused() -> None:
    raw, rope = written(config()), {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    raw["transformer_layer_config"]["rope_parameters"] = rope | {"original_max_position_embeddings": 64}
    with pytest.raises(UserError, match="here has rope type longrope: past 64 tokens"):
        draft_config_from_speculators(raw, "here")


@pytest.mark.parametrize("change", [{"speculators_model_type": "dflash"}, {"speculators_model_type": None}])
def test_another_kind_of_draft_is_refused(change: dict) -> None:
    with pytest.raises(UserError, match="not an EAGLE-3 draft in speculators layout"):
        draft_config_from_speculators(written(config()) | change, "here")


def test_the_shape_of_the_layers_must_be_stated() -> None:
    with pytest.raises(UserError, match="here lacks transformer_layer_config"):
        draft_config_from_speculators(written(config()) | {"transformer_layer_config": None}, "here")
