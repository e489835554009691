"""The parts of the doctor: statistics that do not decide from noise, candidates, vocabulary readings, serving lines."""

import dataclasses

import numpy as np
import pytest

from eagle3_jax.doctor.candidates import network_candidates, tap_candidates
from eagle3_jax.doctor.fix import repairable
from eagle3_jax.doctor.measure import Measured, effective_clusters, slots_of
from eagle3_jax.doctor.opening import Opened, readings
from eagle3_jax.doctor.report import serving_lines
from eagle3_jax.doctor.search import SIGNIFICANT, _decide
from eagle3_jax.doctor.wiring import Wiring, with_config
from eagle3_jax.draft.config import DraftConfig
from eagle3_jax.models.config import decoder_config
from eagle3_jax.models.rope import rope_from_hf
from eagle3_jax.taps import TapSet
from eagle3_jax.training.step import Batch
from tests.tiny import target_config


def wiring(*taps: int, **flags: bool) -> Wiring:
    return Wiring(DraftConfig(decoder_config(target_config()), TapSet(taps), 128, 64, **flags))


def measured(right: np.ndarray, of: Wiring, slots_a_document: int = 20) -> Measured:
    cluster = np.arange(right.shape[-1]) // slots_a_document
    return Measured(of, right, np.ones_like(right), cluster, 0.0)


def draws(seed: int, slots: int, *shares: float) -> list[np.ndarray]:
    """Hits of independent slots, [1, slots] for each share."""
    rng = np.random.default_rng(seed)
    return [rng.random((1, slots)) < share for share in shares]


def test_noise_decides_nothing_and_a_real_difference_does():
    declared, other = wiring(2, 4, 6), wiring(0, 2, 4)
    wrong = 0
    for seed in range(200):
        a, b = draws(seed, 400, 0.5, 0.5)
        best, _ = _decide(measured(a, declared), [measured(a, declared), measured(b, other)])
        wrong += best.wiring != declared
    assert wrong <= 3  # one sided, three standard errors: 0.1 %
    a, b = draws(0, 400, 0.34, 0.77)
    pair = [measured(a, declared), measured(b, other)]
    assert _decide(pair[0], pair)[0].wiring == other
    few = [measured(a[:, :120], declared), measured(b[:, :120], other)]  # six documents
    assert _decide(few[0], few)[0].wiring == declared
    assert pair[1].above(pair[0]) > SIGNIFICANT and pair[0].above(pair[0]) == 0


def test_whole_documents_that_go_together_count_once():
    """Thirty documents, each right or wrong as a whole: the error is that of thirty draws, not of six hundred."""
    whole = np.repeat(draws(1, 30, 0.5)[0], 20, axis=1)
    single = draws(1, 600, 0.5)[0]
    together, apart = measured(whole, wiring(2, 4, 6)), measured(single, wiring(2, 4, 6))
    assert together.error[0] == pytest.approx(0.5 / 30**0.5, rel=0.1)
    assert apart.error[0] == pytest.approx(0.5 / 600**0.5, rel=0.3)


def test_of_equals_the_simplest_wins():
    declared = wiring(2, 4, 6)
    one = wiring(0, 2, 4)
    two = with_config(one, norm_before_residual=True)
    a, b = draws(0, 400, 0.3, 0.8)
    best, contenders = _decide(measured(a, declared), [measured(b, two), measured(b, one), measured(a, declared)])
    assert best.wiring == one and [m.wiring for m in contenders] == [two]


@pytest.mark.parametrize(
    ("declared", "truth"),
    [
        ((3, 31, 59), (0, 3, 31)),  # the founding story
        ((0, 3, 31), (3, 31, 59)),
        ((2, 30, 58), (3, 31, 59)),
        ((2, 30, 58), (1, 29, 57)),
        ((2, 30, 58), (58, 2, 30)),
        ((2, 30, 58), (2, 30, 61)),
        ((2, 30, 58), (0, 30, 58)),
        ((5, 9, 11), (2, 30, 58)),
    ],
)
def test_plausible_taps_are_among_the_candidates(declared, truth):
    found = tap_candidates(wiring(*declared), 61)
    assert wiring(*truth) in found
    assert len(set(found)) == len(found) and all(len(w.taps) == 3 for w in found)
    assert dataclasses.replace(wiring(*declared[:2], 61), last_normed=True) in found


def test_a_longrope_of_the_target_is_no_candidate():
    """Its factors, one a pair of the target's dimensions, may not even fit the draft's heads; no draft has them."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
    long = rope_from_hf({"rope_parameters": {"rope_type": "longrope", "rope_theta": 7e3} | factors}, 8)
    ropes = [w.config.decoder.rope for w in network_candidates(wiring(2, 4, 6), False, long)]
    assert 7e3 in [rope.theta for rope in ropes] and {rope.kind for rope in ropes} == {"default"}


def test_readings_of_a_map():
    absolute = np.array([3, 4, 9, 20])
    offsets = absolute - np.arange(4)
    member = np.isin(np.arange(30), absolute)
    found = readings(offsets, member, 4, 30)
    assert next(iter(found)) == "offsets" and found["offsets"].tolist() == absolute.tolist()
    assert "t2d" not in found  # says the same
    assert readings(absolute, member, 4, 30)["absolute"].tolist() == absolute.tolist()
    assert readings(offsets - np.arange(4), None, 4, 30)["offsets of offsets"].tolist() == absolute.tolist()
    assert list(readings(None, member, 4, 30)) == ["none", "t2d"]
    assert list(readings(None, None, 30, 30)) == ["none"]


def test_serving_lines_say_what_each_server_reads():
    lines = "\n".join(serving_lines(wiring(2, 4, 6)))
    assert '"eagle_aux_hidden_state_layer_ids": [2, 4, 6]' in lines  # vLLM: block inputs
    assert 'any version, config.json: "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]' in lines
    lines = "\n".join(serving_lines(wiring(3, 5, 7)))
    assert "[2, 4, 6]" in lines and "since (adds one if the first id is 1), config.json" in lines
    assert "cannot be said" in "\n".join(serving_lines(wiring(1, 4, 6)))
    assert "the embedding has none" in "\n".join(serving_lines(wiring(0, 4, 6)))
    assert "it has no norm_before_residual" in "\n".join(serving_lines(wiring(2, 4, 6, norm_before_residual=True)))


def test_what_replaces_the_declared_wiring_is_better_than_it():
    """The top one, of two changes, beats the declared one by little but always; one with a single change is noise."""
    rng = np.random.default_rng(3)
    base = rng.random((1, 600)) < 0.4
    top = base.copy()
    top[0, ::20] = True  # in every document
    noisy = rng.random((1, 600)) < 0.4
    noisy[0, :20] = ~base[0, :20]
    declared = measured(base, wiring(2, 4, 6))
    best_one = measured(top, wiring(0, 2, 4, norm_output=True))
    other = measured(noisy, wiring(0, 2, 4))
    assert best_one.above(declared) > SIGNIFICANT and other.above(declared) < SIGNIFICANT
    best, contenders = _decide(declared, [declared, other, best_one])
    assert best is best_one and not contenders


def test_unequal_documents_weigh_less_than_their_number():
    assert effective_clusters(np.arange(30) // 3) == pytest.approx(10)
    sizes = [480] * 8 + [20] * 10
    assert effective_clusters(np.repeat(np.arange(18), sizes)) == pytest.approx(8.8, abs=0.1)


def test_unequal_documents_are_cut_into_pieces():
    ids = np.zeros((1, 400), np.int32)
    documents = np.repeat([0, 1], [300, 100])[None]
    batch = Batch(ids, np.ones_like(ids, bool), documents)
    cluster = slots_of([batch], 1).cluster
    counts = np.bincount(cluster)
    assert counts.max() == 16 and len(counts) == 19 + 7  # 299 and 99 slots
    assert effective_clusters(cluster) > SIGNIFICANT**2


def test_a_reading_that_is_no_map_is_not_written():
    of = wiring(2, 4, 6)
    maps = {"offsets": np.full(128, 512, np.int32), "absolute": np.arange(128, dtype=np.int32)}
    opened = object.__new__(Opened)  # the draft itself plays no part
    vars(opened).update(declared=of, maps=maps, faults=["d2t is no map"])
    assert not repairable(of, opened) and repairable(dataclasses.replace(of, d2t="absolute"), opened)
