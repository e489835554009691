"""The draft's training graph against speculators 0.9: logits of four steps, losses, accuracies and every gradient.

Golden facts used here (see ../shared/golden/README.md): speculators drops the first token of each document and feeds
slot t the hidden state of token t with the embedding of token t+1, as we do on unshifted arrays. In a packed row its
last slots of a document read tokens and masks of the next one; ours do not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import eagle3_jax as e3
from eagle3_jax.draft.ttt import document_positions, shift, ttt_forward, ttt_outputs
from eagle3_jax.models.weights import flatten
from eagle3_jax.training.loss import Teacher, acceptance, at_tokens, hits, kl_divergence, ttt_loss
from tests.tiny import relative

STEPS = 4
CHUNK = 7  # tokens whose logits exist at a time: no divisor of those there are
CASES = ["base", "bias", "fullvocab", "headdim", "nbfc", "nbr", "normout", "qwen3draft"]


class Case(NamedTuple):
    """A golden draft, its documents joined to one unshifted row, and what speculators computed."""

    draft: e3.Draft
    features: e3.Taps
    ids: jax.Array
    loss_mask: jax.Array
    document_ids: jax.Array
    teacher_logits: jax.Array
    expected: dict[str, np.ndarray]

    @property
    def lengths(self) -> list[int]:
        return np.bincount(self.document_ids[0]).tolist()


def load(folder: Path) -> Case:
    draft, expected = e3.load_draft(folder), load_file(folder / "expected.safetensors")
    count = sum(name.startswith("raw.") and name.endswith(".input_ids") for name in expected)

    def row(name: str) -> np.ndarray:
        return np.concatenate([expected[f"raw.{i}.{name}"] for i in range(count)])[None]

    lengths = [len(expected[f"raw.{i}.input_ids"]) for i in range(count)]
    # The teacher of speculators: the target's final norm with the *draft's* eps, then the target's rows of the map.
    last = row("verifier_last_hidden_states")
    normed = last / np.sqrt((last**2).mean(-1, keepdims=True) + draft.config.decoder.rms_norm_eps)
    teacher = normed * expected["verifier.norm.weight"] @ expected["verifier.lm_head_draft_rows.weight"].T
    return Case(
        draft,
        e3.Taps.from_fused(jnp.asarray(row("hidden_states")), draft.taps),
        jnp.asarray(row("input_ids"), jnp.int32),
        jnp.asarray(row("loss_mask") > 0),
        jnp.asarray(np.repeat(np.arange(count), lengths)[None], jnp.int32),
        jnp.asarray(teacher),
        expected,
    )


class Computed(NamedTuple):
    """What training computes of a case: losses and choices a few tokens at a time, gradients by checkpoint name."""

    total: Any
    losses: Any
    choices: Any
    logits: list[Any]
    gradients: dict[str, Any]


def run(case: Case) -> Computed:
    positions = document_positions(case.document_ids)

    @jax.jit
    def value_and_grad(params, case_arrays):
        features, ids, loss_mask, documents, teacher = case_arrays

        def loss(params):
            model = case.draft.graph.merge(params)
            outputs = ttt_outputs(model, features, ids, positions, documents, STEPS)
            states, head = [model.norm(y) for y in outputs], model.lm_head.weight[...]
            total, losses, choices, _ = ttt_loss(states, Teacher(teacher), loss_mask, documents, head=head, chunk=CHUNK)
            return total, (losses, choices, [model.logits(y) for y in outputs])

        return jax.value_and_grad(loss, has_aux=True)(params)

    (total, rest), gradients = value_and_grad(case.draft.params, case[1:6])
    return Computed(total, *rest, flatten(gradients))


@pytest.fixture(scope="module")
def results(golden: Callable[[str], Path]) -> Callable[[str], tuple[Case, Any]]:
    """Each golden case computed once."""
    done: dict[str, tuple[Case, Any]] = {}

    def get(name: str) -> tuple[Case, Any]:
        if name not in done:
            case = load(golden(f"drafts/{name}"))
            done[name] = case, run(case)
        return done[name]

    return get


@pytest.mark.parametrize("name", CASES)
def test_logits_of_every_step(results, name: str) -> None:
    case, computed = results(name)
    logits = computed.logits
    for step in range(STEPS):
        valid = case.ids.shape[1] - 1 - step  # later slots were fed token 0
        assert logits[step].dtype == np.float32
        assert relative(logits[step][:, :valid], case.expected[f"out.logits.{step}"][:, :valid]) < 1e-4, step


@pytest.mark.parametrize("name", CASES)
def test_losses(results, name: str) -> None:
    case, computed = results(name)
    np.testing.assert_allclose(computed.total, case.expected["out.loss_total"], rtol=2e-5)
    for step in range(STEPS):
        np.testing.assert_allclose(computed.losses[step], case.expected[f"out.loss.{step}.sum"], rtol=5e-5)
    decayed = sum(0.8**step * loss for step, loss in enumerate(computed.losses))
    np.testing.assert_allclose(decayed, case.expected["out.loss_total_decay0.8"], rtol=2e-5)


@pytest.mark.parametrize("name", [*CASES, "packed"])
def test_the_teacher_over_the_draft_vocabulary(results, name: str) -> None:
    case, _ = results(name)
    shifted = np.concatenate(  # out.targets[t] belongs to token t+1 of each document
        [np.asarray(part)[1:] for part in np.split(case.teacher_logits[0], np.cumsum(case.lengths)[:-1])]
    )
    assert relative(shifted, case.expected["out.targets"][0, : len(shifted)]) < 1e-4


def speculators_accuracies(right: np.ndarray, mask: np.ndarray) -> list[tuple[int, int, int]]:
    """(right so far, supervised, right before) of each step; right and mask are [S, T-1].

    The first step's mask stays in the running product, later masks only select what is summed; a slot whose token lies
    beyond the row drops out of the product.
    """
    rows, so_far = [], mask[0]
    for step in range(len(right)):
        so_far = so_far & (np.arange(len(so_far)) < len(so_far) - step)
        before, so_far = so_far, so_far & right[step]
        rows.append(((so_far & mask[step]).sum(), mask[step].sum(), before.sum()))
    return rows


@pytest.mark.parametrize("name", CASES)
def test_accuracies(results, name: str) -> None:
    case, computed = results(name)
    d2t = jnp.asarray(case.draft.d2t)
    choice = d2t[jnp.argmax(case.teacher_logits, axis=-1)]  # speculators knows no token outside the draft vocabulary
    every = at_tokens([jnp.argmax(logits, axis=-1) for logits in computed.logits])
    taught = np.asarray(case.loss_mask)
    np.testing.assert_array_equal(computed.choices[taught], every[taught])
    right = np.asarray(hits(every, choice, d2t))[:, 0]
    mask = np.stack([np.asarray(shift(case.loss_mask, 1 + s, False))[0, :-1] for s in range(STEPS)])
    for step, (full, supervised, before) in enumerate(speculators_accuracies(right, mask)):
        assert full == case.expected[f"out.full_acc.{step}.sum"] == case.expected[f"out.cond_acc.{step}.sum"]
        assert supervised == case.expected[f"out.full_acc.{step}.total"]
        assert before == case.expected[f"out.cond_acc.{step}.total"]
    first = acceptance(jnp.asarray(right)[:, None], case.loss_mask, case.document_ids)
    assert (first.right[0], first.total[0]) == (
        case.expected["out.full_acc.0.sum"],
        case.expected["out.full_acc.0.total"],
    )  # deeper, ours leaves out slots whose answer has ended


@pytest.mark.parametrize("name", CASES)
def test_every_gradient(results, name: str) -> None:
    case, computed = results(name)
    gradients = computed.gradients
    expected = {key.removeprefix("grad."): g for key, g in case.expected.items() if key.startswith("grad.")}
    assert set(gradients) - set(expected) == {"embed_tokens.weight"}  # frozen there
    assert set(expected) <= set(gradients)
    for parameter, gradient in expected.items():
        assert relative(gradients[parameter], gradient) < 1e-4, parameter


# --- a packed row: three documents in one


def test_packed_losses_are_those_of_speculators_under_its_own_masks(results) -> None:
    """Only the masks differ. Its slots near a document's end read on in the next document; so must ours to compare."""
    case, _ = results("packed")
    expected = case.expected
    model = case.draft.graph.merge(case.draft.params)
    inputs = {name: jnp.asarray(expected[f"in.{name}"]) for name in ("input_ids", "loss_mask", "document_ids")}
    # One token before the row makes our unshifted arrays of its shifted ones: slot t then reads token t of it.
    shifted = lambda a, fill: jnp.pad(a, ((0, 0), (1, 0)), constant_values=fill)  # noqa: E731
    ids, mask = shifted(inputs["input_ids"], 0), shifted(inputs["loss_mask"], 0) > 0
    documents = jnp.pad(inputs["document_ids"], ((0, 0), (0, 1)), constant_values=-1)
    hidden = jnp.pad(jnp.asarray(expected["in.hidden_states"]), ((0, 0), (0, 1), (0, 0)))
    positions = jnp.pad(jnp.asarray(expected["in.position_ids"]), ((0, 0), (0, 1)))
    taps = e3.Taps.from_fused(hidden, case.draft.taps)
    logits = jax.jit(lambda *a: ttt_forward(model, *a, STEPS))(taps, ids, positions, documents)
    teacher = jnp.asarray(expected["out.targets"])
    width, total = teacher.shape[1], 0.0
    real = int((expected["in.document_ids"] >= 0).sum())
    for step in range(STEPS):
        assert relative(logits[step][0, :real], expected[f"out.logits.{step}"][0, :real]) < 1e-4
        leaky = np.asarray(shift(mask, 1 + step, False))[:, :-1]
        kl = np.asarray(kl_divergence(shift(teacher, step), logits[step][:, :width]))
        loss = (kl * leaky).sum() / (leaky.sum() + 1e-5)
        np.testing.assert_allclose(loss, expected[f"out.loss.{step}.sum"], rtol=5e-5)
        total += loss
    np.testing.assert_allclose(total, expected["out.loss_total"], rtol=2e-5)


def test_packed_logits_equal_within_documents(results) -> None:
    case, (_, steps, _, logits, _) = results("packed")
    ends = np.cumsum(case.lengths)
    for step in range(STEPS):
        ours = [t for b, e in zip([0, *ends[:-1]], ends, strict=True) for t in range(b, e - 1 - step)]
        documents = np.asarray(case.document_ids[0])
        theirs = [t - documents[t] for t in ours]  # one token less for each document before
        assert relative(logits[step][0, ours], case.expected[f"out.logits.{step}"][0, theirs]) < 1e-4
    # Step 0 looks at no later token, so masks agree there; deeper, theirs includes slots that cross a document.
    np.testing.assert_allclose(steps[0], case.expected["out.loss.0.sum"], rtol=5e-5)
    assert abs(float(steps[3]) / float(case.expected["out.loss.3.sum"]) - 1) > 0.05
