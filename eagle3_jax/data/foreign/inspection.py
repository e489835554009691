"""`eagle3 data inspect`: what a file of stored features holds, what it says of it, and what it looks like."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.data import foreign
from eagle3_jax.data.foreign.identify import ALIEN, Measured, looks, measure, tokens_needed
from eagle3_jax.data.foreign.sample import Sample
from eagle3_jax.models.target import Target


def inspect_features(path: Path, target: Target | None = None) -> dict[str, Any]:
    """Inspects a file, or a folder by its first files (as many as it takes to be certain about norms).

    Returns {file, format, files, inspected (of those files), tokens, supervised (None: no mask in the file),
    hidden_size, says: {ids, convention, last_hidden, where}, states: [{name, dtype, rms, spread, peak, looks_like,
    certain, measured}], stored}; see `identify.Looks` for the numbers. With a target measured is {tap, normed, words,
    distance, second} and stored the config's `data.stored` (None where no training can read the file); else both None.
    Raises UserError for files that are no stored features, or of another target.
    """
    files = foreign.sample_files(path)
    samples: list[Sample] = []
    for file in files:
        sample = foreign.open_sample(file)
        if samples and (sample.format, sample.state_names) != (samples[0].format, samples[0].state_names):
            break
        samples.append(sample)
        if sum(len(s.input_ids) for s in samples) >= tokens_needed(sample.hidden_size):
            break
    first = samples[0]
    columns = zip(*(sample.states() for sample in samples), strict=True)
    arrays = [np.concatenate(column) for column in columns]
    judged = looks(arrays, np.concatenate([sample.input_ids for sample in samples]))
    found = [None] * len(arrays) if target is None else measure(first, target)
    states = []
    for name, array, look, measured in zip(first.state_names, arrays, judged, found, strict=True):
        values = asdict(look)
        state = {"name": name, "dtype": str(array.dtype), "looks_like": values.pop("like"), **values, "measured": None}
        if measured is not None:
            words = {"tap": measured.point, "words": measured.words(target.num_layers)}
            state["measured"] = {**words, **{key: getattr(measured, key) for key in ("normed", "distance", "second")}}
        states.append(state)
    masks = [sample.loss_mask for sample in samples]
    return {
        "file": str(path),
        "format": first.format,
        "files": len(files),
        "inspected": len(samples),
        "tokens": sum(len(sample.input_ids) for sample in samples),
        "supervised": None if any(mask is None for mask in masks) else int(sum(mask.sum() for mask in masks)),
        "hidden_size": first.hidden_size,
        "says": asdict(first.says),
        "states": states,
        "stored": None if target is None else _stored(first, found, target.num_layers),
    }


def _stored(sample: Sample, found: list[Measured], num_layers: int) -> dict[str, Any] | None:
    """The section `data.stored` that says what was measured; None without a last hidden state or for another target."""
    named = found[:-1] if sample.last_is_named else found
    last = [m for m in (found[-1:] if sample.last_is_named else found) if m.point == num_layers]
    if len(last) != 1 or any(m.distance > ALIEN for m in found):
        return None
    norm = "post-norm" if last[0].normed else "pre-norm"
    return {"ids": [m.point for m in named], "convention": "block-input", "last_hidden": norm}
