"""Rotary frequencies of every variant against formulas written down a second time in float64; what is refused."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.errors import UserError
from eagle3_jax.models.rope import rope_from_hf, rotary, rotate

DIM, THETA, WINDOW = 16, 10000.0, 128


def parse(**config):
    return rope_from_hf({"max_position_embeddings": WINDOW} | config, DIM)


def plain() -> list[float]:
    return [THETA ** (-2 * i / DIM) for i in range(DIM // 2)]


def llama3(factor: float, low: float, high: float, window: int) -> list[float]:
    out = []
    for f in plain():
        wavelength = 2 * math.pi / f
        if wavelength < window / high:
            out.append(f)
        elif wavelength > window / low:
            out.append(f / factor)
        else:
            smooth = (window / wavelength - low) / (high - low)
            out.append((1 - smooth) * f / factor + smooth * f)
    return out


def yarn(factor: float, window: int, fast: float = 32, slow: float = 1, truncate: bool = True) -> list[float]:
    def dimension(rotations: float) -> float:
        return DIM * math.log(window / (rotations * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = dimension(fast), dimension(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    out = []
    for i, f in enumerate(plain()):
        interpolated = min(max((i - low) / (high - low), 0), 1)
        out.append(f / factor * interpolated + f * (1 - interpolated))
    return out


def dynamic(factor: float, length: int) -> list[float]:
    length = max(length, WINDOW)
    base = THETA * (factor * length / WINDOW - (factor - 1)) ** (DIM / (DIM - 2))
    return [base ** (-2 * i / DIM) for i in range(DIM // 2)]


def assert_angles(rope, frequencies: list[float], scale: float = 1.0, lengths=None, upto: int = 300) -> None:
    positions = np.arange(upto)
    cos, sin = rotary(rope, jnp.asarray(positions)[None], lengths)
    angles = positions[:, None] * np.asarray(frequencies)
    np.testing.assert_allclose(cos[0], np.cos(angles) * scale, atol=2e-4)  # float32 angles of up to 300 radians
    np.testing.assert_allclose(sin[0], np.sin(angles) * scale, atol=2e-4)


def test_default() -> None:
    assert_angles(parse(rope_parameters={"rope_type": "default", "rope_theta": THETA}), plain())
    assert_angles(parse(rope_theta=THETA), plain())
    assert_angles(parse(), plain())  # 10000 is the family's default


def test_theta_is_read() -> None:
    rope = parse(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert rope.theta == 500000.0 == parse(rope_theta=500000.0).theta
    assert_angles(rope, [500000.0 ** (-2 * i / DIM) for i in range(DIM // 2)])


def test_linear() -> None:
    assert_angles(parse(rope_parameters={"rope_type": "linear", "factor": 4.0}), [f / 4 for f in plain()])


def test_llama3() -> None:
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    expected = llama3(8, 1, 4, 32)
    ratios = np.asarray(plain()) / expected
    assert ratios.min() == 1 and ratios.max() == 8 and ((ratios > 1.01) & (ratios < 7.99)).any()  # all three regions
    rope = parse(rope_parameters={"rope_type": "llama3", "original_max_position_embeddings": 32} | numbers)
    assert_angles(rope, expected)


@pytest.mark.parametrize(("window", "truncate"), [(64, True), (64, False), (4, False)])  # 4: the range is reversed
def test_yarn(window: int, truncate: bool) -> None:
    numbers = {"factor": 4.0, "original_max_position_embeddings": window, "truncate": truncate}
    rope = parse(rope_parameters={"rope_type": "yarn"} | numbers)
    assert_angles(rope, yarn(4, window, truncate=truncate), scale=0.1 * math.log(4) + 1)


def test_yarn_options() -> None:
    base = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert_angles(parse(rope_parameters=base | {"attention_factor": 1.5}), yarn(4, 64), scale=1.5)
    assert_angles(
        parse(rope_parameters=base | {"beta_fast": 8.0, "beta_slow": 2.0}), yarn(4, 64, 8, 2), 0.1 * math.log(4) + 1
    )
    ratio = (0.1 * 0.7 * math.log(4) + 1) / (0.1 * 0.5 * math.log(4) + 1)
    assert_angles(parse(rope_parameters=base | {"mscale": 0.7, "mscale_all_dim": 0.5}), yarn(4, 64), ratio)


def test_yarn_without_factor_divides_the_windows() -> None:
    rope = parse(rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 32})
    assert_angles(rope, yarn(WINDOW / 32, 32), 0.1 * math.log(4) + 1)


def test_longrope_takes_other_factors_beyond_the_original_window() -> None:
    short, long = [1.0 + 0.1 * i for i in range(8)], [2.0 + i for i in range(8)]
    numbers = {"short_factor": short, "long_factor": long, "original_max_position_embeddings": 32}
    rope = parse(rope_parameters={"rope_type": "longrope"} | numbers)
    scale = math.sqrt(1 + math.log(WINDOW / 32) / math.log(32))
    for length, factors in ((32, short), (33, long)):
        expected = [f / factor for f, factor in zip(plain(), factors, strict=True)]
        assert_angles(rope, expected, scale, lengths=jnp.full((1, 300), length))
    assert parse(rope_parameters=rope.to_hf()) == rope
    outside = parse(
        rope_parameters={"rope_type": "longrope"} | numbers | {"original_max_position_embeddings": None},
        original_max_position_embeddings=32,
    )
    assert outside == rope


def test_a_part_of_a_head_can_be_rotated() -> None:
    rope = rope_from_hf({"partial_rotary_factor": 0.75}, DIM, partial=True)
    assert rope.head_dim == 12
    x = jnp.arange(2.0 * DIM).reshape(1, 2, 1, DIM)
    turned = rotate(x, *rotary(rope, jnp.asarray([[3, 4]])))
    np.testing.assert_array_equal(turned[..., 12:], x[..., 12:])
    assert not np.allclose(turned[..., :12], x[..., :12])


def test_an_odd_part_of_a_head_is_rounded_up_as_in_transformers() -> None:
    rope = rope_from_hf({"partial_rotary_factor": 0.32}, DIM, partial=True)  # 5 of 16: six are rotated
    assert_angles(rope, [THETA ** (-2 * i / 5) for i in range(3)])


def test_dynamic_grows_with_the_length() -> None:
    rope = parse(rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    for length in (40, WINDOW, 300):
        assert_angles(rope, dynamic(2, length), lengths=jnp.full((1, 300), length))
    cos, _ = rotary(rope, jnp.asarray([[50, 250]]))  # without lengths: the length at which a token is written
    np.testing.assert_allclose(cos[0, 0], np.cos(50 * np.asarray(dynamic(2, 51))), atol=2e-4)
    np.testing.assert_allclose(cos[0, 1], np.cos(250 * np.asarray(dynamic(2, 251))), atol=2e-4)


def test_pairs_are_half_a_head_apart() -> None:
    x = jnp.zeros((1, 1, 1, 4)).at[..., 0].set(1.0)
    turned = rotate(x, jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2)))  # a quarter turn
    np.testing.assert_array_equal(turned[0, 0, 0], [0, 0, 1, 0])  # interleaved pairs would give [0, 1, 0, 0]


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_old_style_keys(key: str) -> None:
    old = parse(rope_theta=500000.0, rope_scaling={key: "linear", "factor": 4.0})
    assert old == parse(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0})


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    ],
)
def test_writing_and_reading_are_inverse(parameters: dict) -> None:
    rope = parse(rope_parameters=parameters | {"rope_theta": 500000.0})
    assert parse(rope_parameters=rope.to_hf()) == rope


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor in config.json must be 8 positive numbers"),
        ({"rope_scaling": {"type": "su"}}, "'su' in config.json is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"lacks \['factor'\]"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta": 3}}, r"does not know \['beta'\]"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
            "rope_theta 10000.0 and inside its rope parameters 500000.0 / keep one",
        ),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "keep one of them"),
        ({"rope_parameters": {"factor": [2.0]}, "rope_scaling": {"factor": [4.0]}}, "keep one of them"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": [2.0]}},
            r"factor in config.json is \[2.0\] / it must",
        ),
        ({"rope_theta": "500000"}, "rope_theta in config.json is '500000' / it must be a positive number"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": "no"}},
            "truncate in config.json is 'no'",
        ),
        ({"rope_scaling": [1]}, r"rope_scaling in config.json is \[1\] / it must be an object"),
        ({"rope_scaling": {"type": ["yarn"]}}, r"rope type \['yarn'\] in config.json is not supported"),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            "keep one of them",
        ),
    ],
)
def test_what_is_not_understood_is_refused(config: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(**config)
