"""Optimisers and schedules (spec section 4.4). Masters and moments are float32."""

import math

import jax
import optax
from optax import contrib

from eagle3_jax.config import OptimiserConfig


def make_optimiser(config: OptimiserConfig) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW, or Muon for the matrices of fc and the blocks with AdamW for the rest.

    Updates are at the peak learning rate; the step scales them by `learning_rate_factor`.
    """
    adamw = optax.adamw(config.learning_rate, *config.betas, weight_decay=config.weight_decay)
    clip = optax.identity() if config.clip is None else optax.clip_by_global_norm(config.clip)
    if config.name == "adamw":
        return optax.chain(clip, adamw)
    muon = contrib.muon(
        config.muon_learning_rate,
        weight_decay=config.weight_decay,
        adam_b1=config.betas[0],
        adam_b2=config.betas[1],
        adam_weight_decay=config.weight_decay,
        adam_learning_rate=config.learning_rate,
        muon_weight_dimension_numbers=_muon_dimensions,
        consistent_rms=0.2,  # scales updates to AdamW's usual size (Moonlight, arXiv 2502.16982)
    )
    return optax.chain(clip, muon)


def _muon_dimensions(params):
    """[out, in] for the matrices of fc and the blocks; None, which means AdamW, for all else."""

    def dimensions(path, leaf):
        hidden = leaf.ndim == 2 and path[0].key not in ("lm_head", "embed_tokens")
        return contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0) if hidden else None

    return jax.tree_util.tree_map_with_path(dimensions, params)


def learning_rate_factor(config: OptimiserConfig, progress: float) -> float:
    """Share of the peak learning rate at `progress` in [0, 1] of the run: linear warm-up, then the schedule.

    Progress rather than a step count, so that a run with a time budget decays in time.
    """
    if progress < config.warmup:
        return max(progress / config.warmup, 1e-2)
    rest = min((progress - config.warmup) / max(1.0 - config.warmup, 1e-9), 1.0)
    left = (1.0 - progress) / max(min(config.decay, 1.0 - config.warmup), 1e-9)
    height = {
        "cosine": 0.5 * (1 + math.cos(math.pi * rest)),
        "linear": 1.0 - rest,
        "constant": 1.0,
        "wsd": min(max(left, 0.0), 1.0),
    }[config.schedule]
    return config.final_rate + (1.0 - config.final_rate) * height
