"""The wiring contract: which features a tensor holds, in which order, is part of its type, and a mix-up never passes.

Every refusal here must happen while tracing: inputs are abstract (`jax.ShapeDtypeStruct`), so that no number can exist.
"""

from collections.abc import Iterator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import eagle3_jax as e3
from eagle3_jax.models.decoder import CausalLM
from eagle3_jax.taps import (
    LastHidden,
    Taps,
    TapSet,
    WiringError,
    from_block_outputs,
    fuse,
    paper_taps,
    to_block_outputs,
)
from tests.tiny import ids_of, relative, with_fc, write_target

WIDTH = 4
points = st.lists(st.integers(0, 60), min_size=1, max_size=6, unique=True)


def features(taps, seed: int = 0) -> Taps:
    rng = np.random.default_rng(seed)
    return Taps([jnp.asarray(rng.standard_normal((2, 3, WIDTH)), jnp.float32) for _ in taps], TapSet(taps))


def abstract(taps) -> Taps:
    """Taps without numbers: only tracing can look at them."""
    return jax.eval_shape(lambda: Taps([jnp.zeros((2, 3, WIDTH)) for _ in taps], TapSet(taps)))


# --- tap sets


@given(points, points)
def test_sets_are_equal_exactly_when_points_and_order_are(a: list[int], b: list[int]) -> None:
    assert (TapSet(a) == TapSet(b)) == (a == b)
    assert len({TapSet(a), TapSet(b)}) == (1 if a == b else 2)
    assert list(TapSet(a)) == a and len(TapSet(a)) == len(a)


@given(points.filter(lambda p: len(p) > 1))
def test_another_order_is_another_set(p: list[int]) -> None:
    assert TapSet(p) != TapSet(p[::-1]) and TapSet(p) != TapSet(p[1:] + p[:1])
    assert TapSet(p) != tuple(p)


@pytest.mark.parametrize("bad", [[], [2, 2], [2, 4, 2], [-1, 2], [1.0], [True, 2], ["2"], [None]])
def test_impossible_sets_are_refused(bad: list) -> None:
    with pytest.raises(WiringError):
        TapSet(bad)


def test_a_set_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        TapSet([2, 4]).points = (4, 2)


def test_taps_beyond_the_target_are_refused() -> None:
    assert TapSet([8, 0]).check(8) == TapSet([8, 0])
    with pytest.raises(WiringError, match=r"tap 9 does not exist: the target has 8 blocks.*got \[2, 9\]"):
        TapSet([2, 9]).check(8)


def test_sets_in_words() -> None:
    assert TapSet([0, 2, 8]).words(8) == ("[embedding, block 2 input, tap 8 = last block output before the final norm]")
    assert TapSet([8]).words() == "[block 8 input]"  # without a target nobody knows that it is the last


def test_default_taps_are_those_of_the_paper() -> None:
    assert paper_taps(32) == TapSet([2, 16, 29]) and paper_taps(30) == TapSet([2, 15, 27])
    for shallow in (1, 4, 5, 6):  # the three points collapse or disorder
        with pytest.raises(e3.UserError, match="name distinct taps"):
            paper_taps(shallow)


@given(points.filter(lambda p: 0 not in p))
def test_block_output_ids_are_one_less(p: list[int]) -> None:
    assert to_block_outputs(TapSet(p)) == [i - 1 for i in p]
    assert from_block_outputs(to_block_outputs(TapSet(p))) == TapSet(p)


def test_the_embedding_is_no_block_output() -> None:
    with pytest.raises(WiringError, match="embedding"):
        to_block_outputs(TapSet([0, 2]))


# --- arrays


@pytest.mark.parametrize(
    "arrays",
    [
        [jnp.zeros((2, 4))],
        [jnp.zeros((2, 4))] * 3,
        [jnp.zeros((2, 4)), jnp.zeros((2, 5))],
        [jnp.zeros((2, 4)), jnp.zeros((2, 4), jnp.bfloat16)],
    ],
)
def test_arrays_that_do_not_fit_the_set_are_refused(arrays: list) -> None:
    with pytest.raises(WiringError):
        Taps(arrays, TapSet([2, 4]))


@settings(max_examples=20)
@given(points, st.integers(1, 3))
def test_splitting_and_fusing_are_inverse(p: list[int], width: int) -> None:
    fused = jnp.arange(2 * len(p) * width, dtype=jnp.float32).reshape(2, -1)
    taps = Taps.from_fused(fused, p)
    assert taps.tap_set == TapSet(p) and all(a.shape == (2, width) for a in taps.arrays)
    np.testing.assert_array_equal(fuse(taps, TapSet(p)), fused)


def test_fused_features_stand_in_the_order_of_the_set() -> None:
    a, b = jnp.zeros((2, 4)), jnp.ones((2, 4))
    expected = np.concatenate([np.zeros((2, 4)), np.ones((2, 4))], axis=1)
    np.testing.assert_array_equal(fuse(Taps([a, b], TapSet([6, 2])), TapSet([6, 2])), expected)


def test_plain_lists_of_points_do_and_arrays_without_points_do_not(untyped) -> None:
    taps = Taps.from_fused(jnp.arange(6.0)[None], [3, 1, 2])
    np.testing.assert_array_equal(fuse(taps, [3, 1, 2]), jnp.arange(6.0)[None])
    assert_refused(lambda: fuse(taps, [1, 2, 3]), [1, 2, 3], [3, 1, 2])
    with pytest.raises(WiringError, match="does not say what taps it holds / give"):
        fuse(jnp.arange(6.0)[None], taps.tap_set)


def test_a_width_that_does_not_divide_is_refused() -> None:
    with pytest.raises(WiringError, match="width 10 do not divide into the 3 taps"):
        Taps.from_fused(jnp.zeros((2, 10)), [2, 4, 6])


def test_map_keeps_the_set() -> None:
    taps = features([6, 2])
    doubled = taps.map(lambda a: 2 * a)
    assert doubled.tap_set == taps.tap_set
    np.testing.assert_array_equal(doubled.arrays[1], 2 * taps.arrays[1])


# --- wrong wiring

WRONG = {
    "swapped": ([2, 15, 27], [15, 2, 27]),
    "off by one": ([2, 15, 27], [3, 16, 28]),
    "embedding for the last": ([2, 15, 27], [0, 2, 15]),
    "the fault this project began with": ([3, 31, 59], [0, 3, 31]),
    "dropped": ([2, 15, 27], [2, 15]),
    "extra": ([2, 15, 27], [2, 15, 27, 28]),
    "all other": ([2, 15, 27], [1, 3, 5]),
}


def assert_refused(call, expected: list[int], got: list[int]) -> None:
    for kind in (WiringError, AssertionError, ValueError):
        with pytest.raises(kind) as caught:
            call()
    message = str(caught.value)
    assert message == f"expected {TapSet(expected).words()}, got {TapSet(got).words()}"
    assert "\n" not in message


@pytest.mark.parametrize(("expected", "got"), WRONG.values(), ids=WRONG)
def test_wrong_wiring_is_refused_with_both_sides_in_words(expected: list[int], got: list[int]) -> None:
    assert_refused(lambda: fuse(features(got), TapSet(expected)), expected, got)


@pytest.mark.parametrize(("expected", "got"), WRONG.values(), ids=WRONG)
def test_wrong_wiring_is_refused_while_tracing(expected: list[int], got: list[int]) -> None:
    traced = lambda taps: fuse(taps, TapSet(expected))  # noqa: E731
    assert_refused(lambda: jax.eval_shape(traced, abstract(got)), expected, got)
    assert_refused(lambda: jax.jit(traced).lower(abstract(got)), expected, got)
    assert jax.eval_shape(traced, abstract(expected)).shape == (2, 3, WIDTH * len(expected))


@pytest.fixture
def chex_off() -> Iterator[None]:
    chex.disable_asserts()
    yield
    chex.enable_asserts()


@pytest.mark.parametrize(("expected", "got"), WRONG.values(), ids=WRONG)
def test_wrong_wiring_is_refused_with_chex_disabled(chex_off: None, expected: list[int], got: list[int]) -> None:
    chex.assert_equal(1, 2)  # would raise if chex were on
    assert_refused(lambda: fuse(features(got), TapSet(expected)), expected, got)
    assert_refused(lambda: jax.eval_shape(lambda t: fuse(t, TapSet(expected)), abstract(got)), expected, got)


def test_arrays_changed_behind_the_constructor_are_refused_by_fuse() -> None:
    leaves, tree = jax.tree.flatten(features([2, 4]))
    mixed = jax.tree.unflatten(tree, [leaves[0], leaves[1].astype(jnp.bfloat16)])
    with pytest.raises(WiringError, match="differ in shape or dtype"):
        fuse(mixed, TapSet([2, 4]))


def test_the_sets_words_show_the_fault() -> None:
    with pytest.raises(WiringError, match=r"expected \[block 3 input, .* block 59 input\], got \[embedding, block 3"):
        fuse(features([0, 3, 31]), TapSet([3, 31, 59]))


# --- the set under jax transformations


def test_the_set_survives_transformations() -> None:
    taps, tap_set = features([6, 2]), TapSet([6, 2])
    double = lambda t: t.map(lambda a: 2 * a)  # noqa: E731
    total = lambda t: jnp.sum(fuse(t, tap_set) ** 2)  # noqa: E731
    scanned, _ = jax.lax.scan(lambda t, _: (double(t), None), taps, None, length=3)
    outcomes = {
        "jit": jax.jit(double)(taps),
        "scan": scanned,
        "cond": jax.lax.cond(True, double, lambda t: t, taps),
        "while": jax.lax.while_loop(lambda t: t.arrays[0].sum() > 1e9, double, taps),
        "vmap": jax.vmap(double)(taps),
        "grad": jax.grad(total)(taps),
        "eval_shape": jax.eval_shape(double, taps),
        "remat": jax.checkpoint(double)(taps),
        "tree.map": jax.tree.map(lambda a: a + 1, taps),
        "donation": jax.jit(double, donate_argnums=0)(jax.tree.map(jnp.copy, taps)),
    }
    for name, outcome in outcomes.items():
        assert outcome.tap_set == tap_set, name
    np.testing.assert_array_equal(outcomes["scan"].arrays[1], 8 * taps.arrays[1])
    np.testing.assert_array_equal(outcomes["grad"].arrays[1], 2 * taps.arrays[1])


@pytest.mark.parametrize("inside", ["jit", "scan", "cond", "vmap", "grad"])
def test_wrong_wiring_is_refused_inside_transformations(inside: str) -> None:
    joined = lambda t: jnp.sum(fuse(t, TapSet([2, 6])))  # noqa: E731
    call = {
        "jit": jax.jit(joined),
        "scan": lambda t: jax.lax.scan(lambda c, _: (c + joined(t), None), 0.0, None, length=2),
        "cond": lambda t: jax.lax.cond(True, joined, lambda _: 0.0, t),
        "vmap": jax.vmap(joined),
        "grad": jax.grad(joined),
    }[inside]
    assert_refused(lambda: jax.eval_shape(call, abstract([6, 2])), [2, 6], [6, 2])


def test_different_sets_never_meet_in_one_tree() -> None:
    a, b = features([2, 4]), features([4, 2])
    with pytest.raises(ValueError):
        jax.tree.map(jnp.add, a, b)
    with pytest.raises(TypeError):
        jax.lax.cond(True, lambda: a, lambda: b)
    with pytest.raises(TypeError):
        jax.lax.scan(lambda t, _: (Taps(t.arrays, TapSet([4, 2])), None), a, None, length=1)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal_structs(a, b)


def test_another_set_is_another_compilation() -> None:
    seen = []

    @jax.jit
    def traced(taps: Taps) -> jax.Array:
        seen.append(taps.tap_set)
        return taps.arrays[0]

    for p in ([2, 4], [4, 2], [2, 4]):
        traced(features(p))
    assert seen == [TapSet([2, 4]), TapSet([4, 2])]


# --- the teacher's hidden state


def test_a_normed_teacher_is_refused(tiny_target) -> None:
    model: CausalLM = tiny_target.graph.merge(tiny_target.params)
    hidden = jax.ShapeDtypeStruct((1, 3, tiny_target.config.hidden_size), jnp.float32)
    head = lambda array, normed: model.logits(LastHidden(array, normed))  # noqa: E731
    assert jax.eval_shape(lambda a: head(a, False), hidden).shape == (1, 3, 512)
    with pytest.raises(WiringError, match="expected .* before the final norm, got it after the final norm"):
        jax.eval_shape(lambda a: head(a, True), hidden)


def test_the_teachers_norm_state_is_part_of_its_type() -> None:
    before, after = LastHidden(jnp.ones(3), normed=False), LastHidden(jnp.ones(3), normed=True)
    assert jax.jit(lambda x: x)(after).normed and not jax.jit(lambda x: x)(before).normed
    np.testing.assert_array_equal(jax.jit(lambda x: x.before_norm())(before), np.ones(3))
    with pytest.raises(ValueError):
        jax.tree.map(jnp.add, before, after)
    with pytest.raises(TypeError):
        jax.lax.cond(True, lambda: before, lambda: after)


def test_teacher_logits_from_the_last_hidden_state_are_the_targets_own(tiny_target) -> None:
    # tiny norms are far from one, so norming twice or not at all shows
    ids = ids_of(0, 2, 16)
    out = tiny_target.forward(ids, taps=[tiny_target.num_layers])
    x = np.asarray(out.last_hidden, np.float64)
    model = tiny_target.params["model"]
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(model["norm"]["weight"], np.float64)
    head = np.asarray(tiny_target.params["lm_head"]["weight"], np.float64)
    assert relative(out.logits, normed @ head.T) < 1e-5
    np.testing.assert_array_equal(out.taps.arrays[0], out.last_hidden)  # tap N is before the norm as well


# --- fingerprints: fc that selects one tap shows which point of the residual stream really arrives


def selecting(draft: e3.Draft, which: int) -> e3.Draft:
    size, count = draft.config.target_hidden_size, len(draft.taps)
    weight = np.zeros((size, count * size))
    weight[:, which * size : (which + 1) * size] = np.eye(size)
    return with_fc(draft, weight)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_each_part_of_fc_reads_exactly_its_tap(golden, golden_pair, which: int) -> None:
    target, draft = golden_pair
    expected = load_file(golden("targets/llama_gqa") / "expected.safetensors")  # hidden states recorded by hooks on HF
    out = target.forward(expected["input_ids"], taps=draft.taps)
    chosen = selecting(draft, which)
    projected = chosen.graph.merge(chosen.params).project(out.taps)
    np.testing.assert_array_equal(projected, out.taps.arrays[which])
    distance = [relative(projected, expected[f"hidden.{k}"]) for k in range(target.num_layers)]
    tap = list(draft.taps)[which]
    assert distance[tap] < 1e-5
    assert min(d for k, d in enumerate(distance) if k != tap) > 0.05  # its neighbours would be noticed


def test_the_draft_refuses_features_of_other_taps(golden_pair) -> None:
    target, draft = golden_pair
    model = draft.graph.merge(draft.params)
    for wrong in ([4, 2, 5], [3, 5, 6], [0, 2, 4], [2, 4], [2, 4, 5, 6]):
        given = Taps([jnp.zeros((1, 4, 64)) for _ in wrong], TapSet(wrong))
        assert_refused(lambda given=given: jax.eval_shape(model.project, given), list(draft.taps), wrong)
        assert_refused(lambda given=given: draft.ttt_forward(given, ids_of(0, 1, 4), 1), list(draft.taps), wrong)


def test_a_target_without_the_tap_is_refused(tmp_path, tiny_target, tiny_draft) -> None:
    with pytest.raises(WiringError, match="tap 9 does not exist"):
        tiny_target.forward(ids_of(0, 1, 4), taps=[9])
    shallow = e3.load_target(write_target(tmp_path / "shallow", num_hidden_layers=5), dtype="float32")
    with pytest.raises(WiringError, match="tap 6 does not exist: the target has 5 blocks"):
        tiny_draft.bind(shallow)
    with pytest.raises(WiringError, match="tap 6 does not exist"):
        e3.generate(shallow, tiny_draft, [5, 6], max_new_tokens=2, strategy="chain:2")
