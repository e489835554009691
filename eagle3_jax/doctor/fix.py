"""Writing the corrected draft: the best wiring in its config, its tensors as stored."""

import dataclasses
from pathlib import Path

from eagle3_jax.doctor.measure import norm_weights
from eagle3_jax.doctor.opening import Opened, is_map
from eagle3_jax.doctor.wiring import TEACHERS, Wiring
from eagle3_jax.draft.draft import Draft, draft_graph, save_draft


def repairable(best: Wiring, opened: Opened) -> bool:
    """Whether a config or a vocabulary map can say what differs; what the draft was trained to predict, none can.

    Nor is a reading of the map that is no map of distinct target ids written.
    """
    if not is_map(opened.maps[best.d2t], best.config.decoder.vocab_size):
        return False
    said = dataclasses.replace(best, teacher=TEACHERS[0])
    return not best.last_normed and (said != opened.declared or bool(opened.faults))


def corrected(opened: Opened, best: Wiring) -> Draft:
    """The stored draft, dtype and all, with the wiring `best`; its facts tell what was changed."""
    graph, _ = draft_graph(best.config)
    changes = {"declared": opened.declared.to_json(), "changed": best.changes(opened.declared)}
    return Draft(
        best.config,
        graph,
        norm_weights(opened.stored, best.config),
        opened.maps[best.d2t],
        {**opened.stored.facts, "doctor": changes},
    )


def write_fix(opened: Opened, best: Wiring, out: Path) -> None:
    """Writes the corrected draft in speculators layout, whole or not at all."""
    save_draft(corrected(opened, best), out, opened.speculative_tokens)
