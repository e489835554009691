"""The two-stage search: many wirings at depth 1 on few tokens, the best of them at depth 4 on all.

Stage one alternates between taps and network around the best found so far, so that two faults at once are found where
one repair already shows. It ranks by the likelihood of the target's choice, which settles on far fewer tokens than the
accuracy; stage two ranks by accepted tokens.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from eagle3_jax.data.template import Document
from eagle3_jax.doctor.candidates import network_candidates, reversed_feedback, tap_candidates
from eagle3_jax.doctor.measure import DEPTH, Measured, Measurer, effective_clusters, slots_of
from eagle3_jax.doctor.opening import Opened
from eagle3_jax.doctor.states import States, batches, own_answers, pack_rows, select_documents, target_states
from eagle3_jax.doctor.wiring import Wiring
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target

SCREEN_TOKENS = 512  # a batch; the one with the most answer tokens serves for screening
FINALISTS = 5
_ROUNDS = 3
SIGNIFICANT = 3.0  # standard errors: some hundred wirings are compared


@dataclass(frozen=True)
class Diagnosis:
    """declared and best: measured at depth 4 on all tokens, as are the finalists (ranked, one reading a network);
    screened: other networks, at depth 1 on few tokens (ranked). contenders: not told apart from the best. tried: number
    of wirings, all readings counted. own: share of the data's answer tokens that are the target's own choice.
    """

    declared: Measured
    best: Measured
    finalists: list[Measured]
    screened: list[Measured]
    contenders: list[Measured]
    tried: int
    own: float

    @property
    def healthy(self) -> bool:
        return self.best is self.declared


def diagnose(
    target: Target,
    opened: Opened,
    documents: list[Document],
    tokens: int,
    say: Callable[[str], None] = lambda line: None,
    depth: int = DEPTH,
) -> Diagnosis:
    """Measures the draft under every plausible wiring on about `tokens` tokens of documents (ids, loss mask).

    Raises UserError where these hold too few answer tokens for any difference to be significant.
    """
    packed = pack_rows(select_documents(documents, tokens))
    parts = list(batches(packed, SCREEN_TOKENS))
    if effective_clusters(slots_of(parts, 1).cluster) <= SIGNIFICANT**2:
        raise UserError(
            f"{packed.report.supervised_tokens} answer tokens among about {tokens} are too few to tell wirings apart / "
            "give data with longer answers, or raise --tokens"
        )
    say(f"target states of {packed.report.supervised_tokens} answer tokens in {len(parts)} batches")
    states = [target_states(target, part) for part in parts]
    measurer = Measurer(opened.stored.bind(target), opened.maps, target.config.vocab_size)
    fullest = max(range(len(parts)), key=lambda i: int(parts[i].loss_mask.sum()))
    screened = _screen(target, opened, measurer, [states[fullest]], [parts[fullest]], say)
    networks = _finalists(opened.declared, screened)
    say(f"{len(screened)} wirings screened; measuring the best {len(networks)} networks to depth {depth}")
    measured = measurer.measure(networks, states, parts, depth)
    declared = next(m for m in measured if m.wiring == opened.declared)
    best, contenders = _decide(declared, measured)
    finalists = _one_reading_each(measured, opened.declared, lambda m: m.tokens, (declared, best))
    final = {m.wiring for m in measured}
    rest = [m for m in screened if m.wiring not in final]
    others = _one_reading_each(rest, opened.declared, lambda m: m.log_likelihood)
    tried = len(measured) + len(rest)
    return Diagnosis(declared, best, finalists, others, contenders, tried, own_answers(states, parts))


def _screen(
    target: Target, opened: Opened, measurer: Measurer, states: list[States], parts: list, say: Callable[[str], None]
) -> list[Measured]:
    """All wirings tried at depth 1, best first."""
    has_norm = opened.stored.config.norm_before_fc or opened.stored.config.fc_norm
    tried: dict[Wiring, Measured] = {}

    def measure(wirings: list[Wiring]) -> None:
        new = list(dict.fromkeys(_network_only(w, opened.declared) for w in wirings))
        new = [w for w in new if w not in tried]
        if new:
            say(f"screening {len(new)} wirings")
        tried.update({m.wiring: m for m in measurer.measure(new, states, parts, steps=1)})

    def best() -> Wiring:
        return max(tried.values(), key=lambda m: m.log_likelihood).wiring

    measure([opened.declared])
    centre = None
    for _ in range(_ROUNDS):
        if centre == (centre := best()):
            break
        measure(tap_candidates(centre, target.num_layers))
        networks = network_candidates(best(), has_norm, target.config.rope)
        measure([w for w in networks if w.config.norm_output == centre.config.norm_output])  # depth 1 does not see it
    return sorted(tried.values(), key=lambda m: -m.log_likelihood)


def _network_only(wiring: Wiring, declared: Wiring) -> Wiring:
    """The wiring with the declared reading of d2t and the right teacher: those of others come with it for free."""
    return dataclasses.replace(wiring, d2t=declared.d2t, teacher=declared.teacher)


def _finalists(declared: Wiring, screened: list[Measured]) -> list[Wiring]:
    """Networks: the declared one, the likeliest, the most accurate, and two with the other feedback."""
    likely = list(dict.fromkeys(_network_only(m.wiring, declared) for m in screened))
    accurate = sorted(screened, key=lambda m: -m.accuracy[0])
    chosen = [declared, *likely[:FINALISTS], *(_network_only(m.wiring, declared) for m in accurate[:2])]
    chosen += [reversed_feedback(w) for w in (declared, likely[0])]
    return list(dict.fromkeys(chosen))


def _decide(declared: Measured, measured: list[Measured]) -> tuple[Measured, list[Measured]]:
    """The simplest wiring that is not significantly worse than the top one, and the others of which that is true."""
    top = max(measured, key=lambda m: m.tokens)
    level = [m for m in measured if m is top or top.above(m) <= SIGNIFICANT]
    if declared.wiring not in [m.wiring for m in level]:  # then what takes its place must be better than it
        level = [m for m in level if m is top or m.above(declared) > SIGNIFICANT]
    best = min(level, key=lambda m: (len(m.wiring.changes(declared.wiring)), -m.tokens))
    return best, sorted((m for m in level if m is not best), key=lambda m: -m.tokens)


def _one_reading_each(
    measured: list[Measured], declared: Wiring, score: Callable[[Measured], float], keep: tuple[Measured, ...] = ()
) -> list[Measured]:
    """One row a network, with the reading of d2t and the teacher that suit it best, and those to keep; best first."""
    best: dict[Wiring, Measured] = {}
    for m in sorted(measured, key=lambda m: (-score(m), len(m.wiring.changes(declared)))):
        best.setdefault(_network_only(m.wiring, declared), m)
    kept = [m for m in keep if m not in best.values()]
    return sorted([*best.values(), *kept], key=score, reverse=True)
