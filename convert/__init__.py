"""Drafts from and to other systems, one module a format, both directions.

    python -m convert SRC DST --to {speculators,sglang,safeailab,modelopt}
    python -m convert inspect SRC

In memory there is one canonical form (`eagle3_jax.draft.draft.Checkpoint`): taps numbered as block inputs, tensors by
speculators' names. A format's `read` makes it, its `write` leaves it; what the format cannot say is refused by name.
"""
