"""What the doctor says: the ranked table, the verdict in one sentence, what to write for vLLM and SGLang."""

import json
from typing import Any

from eagle3_jax.doctor.measure import Measured
from eagle3_jax.doctor.search import Diagnosis
from eagle3_jax.doctor.wiring import FLAGS, TEACHERS, Wiring
from eagle3_jax.taps import to_block_outputs

_SHOWN = 5  # rows of the table that were only screened
_OWN = 0.95  # share of own answer tokens below which the data is told to be another's
_USELESS = 0.05


def status(diagnosis: Diagnosis) -> str:
    """`best`, `wrong`, or `undecided`: another wiring measures higher, but not by more than the noise."""
    if not diagnosis.healthy:
        return "wrong"
    higher = [m for m in diagnosis.contenders if m.tokens > diagnosis.declared.tokens]
    return "undecided" if higher else "best"


def verdict(diagnosis: Diagnosis, num_layers: int) -> str:
    """One sentence."""
    declared, best = diagnosis.declared, diagnosis.best
    own = declared.wiring.taps_in_words(num_layers)
    if status(diagnosis) == "best":
        return f"the declared wiring {own} is the best of {diagnosis.tried}: {_percent(declared)}, {_tokens(declared)}"
    if status(diagnosis) == "undecided":
        other = diagnosis.contenders[0]
        return (
            f"undecided: {other.wiring.words(declared.wiring, num_layers)} measures {_percent(other)}, "
            f"{_tokens(other)} against {_percent(declared)}, {_tokens(declared)} as declared, which is within the "
            f"noise; the declared wiring {own} stands"
        )
    said = (
        f"trained with {best.wiring.words(declared.wiring, num_layers)}, "
        f"served with {_served(best.wiring, declared.wiring, num_layers)}: "
        f"{100 * declared.accuracy[0]:.0f} % -> {100 * best.accuracy[0]:.0f} %"
    )
    if abs(best.accuracy[0] - declared.accuracy[0]) < 0.01:
        said += f", {declared.tokens:.2f} -> {best.tokens:.2f} tokens a round"
    return said


def remarks(diagnosis: Diagnosis, num_layers: int) -> list[str]:
    """What else a reader must know."""
    declared, best = diagnosis.declared, diagnosis.best
    said = []
    if diagnosis.own < _OWN:
        said.append(
            f"the answers are not the target's own: {diagnosis.own:.0%} of their tokens are its greedy choice; "
            "accuracies differ from those when served, wirings still compare"
        )
    others = [m for m in diagnosis.contenders if m.tokens >= best.tokens]
    if others and not diagnosis.healthy:
        words = "; ".join(m.wiring.words(declared.wiring, num_layers) for m in others[:3])
        said.append(f"not told apart from the best: {words}")
    if best.wiring.teacher != TEACHERS[0]:
        said.append(
            f"it was trained to predict the target's head with {best.wiring.teacher}, which it does on "
            f"{best.accuracy[0]:.0%} of slots; no config repairs that: train again with the right teacher"
        )
    if best.wiring.last_normed:
        said.append("no config can say that the last tap is after the final norm: train again with it before the norm")
    if best.accuracy[0] < _USELESS:
        said.append(f"no wiring reaches {_USELESS:.0%}: is this the draft's target, and is the draft trained?")
    return said


def table(diagnosis: Diagnosis, num_layers: int) -> list[str]:
    """Lines: all finalists, then the best of those only screened."""
    depths = len(diagnosis.declared.accuracy)
    lines = ["rank  " + "".join(f"depth {d + 1:<9}" for d in range(depths)) + "tokens  wiring"]
    ranked = [*diagnosis.finalists, *diagnosis.screened[:_SHOWN]]
    for rank, m in enumerate(ranked, start=1):
        cells = [f"{100 * a:5.1f} ± {100 * e:<4.1f}  " for a, e in zip(m.accuracy, m.error, strict=True)]
        cells += [" " * 15] * (depths - len(cells))
        tokens = f"{m.tokens:6.2f}  " if len(m.accuracy) == depths else " " * 8
        lines.append(f"{rank:>4}  " + "".join(cells) + tokens + _wiring_cell(m, diagnosis, num_layers))
    hidden = len(diagnosis.screened) - _SHOWN
    return lines + [f"      and {hidden} more, screened at depth 1"] * (hidden > 0)


def _wiring_cell(m: Measured, diagnosis: Diagnosis, num_layers: int) -> str:
    declared = diagnosis.declared.wiring
    points = [f"{p} normed" if m.wiring.last_normed and p == num_layers else str(p) for p in m.wiring.taps]
    _, _, others = m.wiring.words(declared, num_layers).partition("]")
    marks = "  (declared)" * (m is diagnosis.declared) + "  (screened)" * (m not in diagnosis.finalists)
    return f"[{', '.join(points)}]{others}{marks}"


def serving_lines(wiring: Wiring) -> list[str]:
    """What to write into config.json so that vLLM and SGLang serve this wiring, or why they cannot."""
    config = wiring.config
    if wiring.last_normed:
        return ["vLLM, SGLang: neither can feed the last tap after the final norm"]
    lines = [f"vLLM    config.json: {_pairs({'eagle_aux_hidden_state_layer_ids': list(wiring.taps)})}"]
    lines.append(f"        config.json: {_pairs({flag: getattr(config, flag) for flag in FLAGS})}")
    rope = config.decoder.rope
    lines.append(f"        config.json, transformer_layer_config: {_pairs({'rope_parameters': rope.to_hf()})}")
    unknown = [flag for flag in ("norm_before_residual", "norm_before_fc") if getattr(config, flag)]
    if unknown:
        return [*lines, f"SGLang  cannot serve it: it has no {', '.join(unknown)}"]
    if 0 in wiring.taps:
        return [*lines, "SGLang  cannot serve it: its ids name block outputs, so the embedding has none"]
    for rule, ids in _sglang_ids(wiring).items():
        said = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}}
        lines.append(f"SGLang  {rule}, config.json: {_pairs(said)}" if ids else f"SGLang  {rule}: cannot be said")
    scaling = {"rope_type": rope.kind, **dict(rope.scaling)} if rope.kind != "default" or rope.scaling else None
    flags = {"fc_norm": config.fc_norm, "norm_output": config.norm_output}
    lines.append(f"        config.json: {_pairs({'rope_theta': rope.theta, 'rope_scaling': scaling, **flags})}")
    return lines


def _sglang_ids(wiring: Wiring) -> dict[str, list[int] | None]:
    """Ids by SGLang's rule. It added one to every id; since May 2026 only where the first id is 1 (spec section 2)."""
    outputs = to_block_outputs(wiring.config.taps)
    if outputs[0] == 1:
        return {"any version": outputs}
    as_they_are = None if wiring.taps[0] == 1 else list(wiring.taps)
    return {"before sglang#25454 (always adds one)": outputs, "since (adds one if the first id is 1)": as_they_are}


def to_json(diagnosis: Diagnosis, num_layers: int, faults: list[str]) -> dict[str, Any]:
    """The keys of api.md and more. Accuracies are of the first draft token; `..._by_depth` of the first d in a row."""
    declared, best = diagnosis.declared, diagnosis.best

    def row(m: Measured) -> dict[str, Any]:
        full = len(m.accuracy) == len(declared.accuracy)
        return {
            **m.wiring.to_json(),
            "words": m.wiring.words(declared.wiring, num_layers),
            "changes": m.wiring.changes(declared.wiring),
            "accuracy": m.accuracy[0],
            "accuracy_by_depth": m.accuracy,
            "standard_error_by_depth": m.error,
            "slot_tau": m.tokens if full else None,
            "slots": int(m.counted[0].sum()),
            "standard_errors_above_declared": m.above(declared) if full else None,
        }

    return {
        "declared": declared.wiring.to_json(),
        "best": best.wiring.to_json(),
        "accuracy_declared": declared.accuracy[0],
        "accuracy_best": best.accuracy[0],
        "accuracy_declared_by_depth": declared.accuracy,
        "accuracy_best_by_depth": best.accuracy,
        "status": status(diagnosis),
        "verdict": verdict(diagnosis, num_layers),
        "remarks": [*faults, *remarks(diagnosis, num_layers)],
        "own_answers": diagnosis.own,
        "serving": serving_lines(best.wiring),
        "table": [row(m) for m in [*diagnosis.finalists, *diagnosis.screened]],
    }


def _served(best: Wiring, declared: Wiring, num_layers: int) -> str:
    """The declared side, with the same facts named as for the best."""
    return declared.words(best, num_layers)


def _percent(m: Measured) -> str:
    return f"{100 * m.accuracy[0]:.1f} ± {100 * m.error[0]:.1f} %"


def _tokens(m: Measured) -> str:
    return f"{m.tokens:.2f} tokens a round"


def _pairs(values: dict[str, Any]) -> str:
    return json.dumps(values)[1:-1]
