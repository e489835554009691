"""Weight-only int8: half the memory of bfloat16 for a target's blocks.

    W[o, i] ~ codes[o, i] * scale[o],   scale[o] = max_i |W[o, i]| / 127,   codes = round(W / scale), symmetric

Each output channel (row) has a float32 scale, with which `blocks.Linear` and `experts.GroupedLinear` multiply their
product; activations keep their dtype. Kernels of the blocks are quantised, those of experts too. Embedding, head,
norms, biases and the router of a mixture of experts are not: small beside the rest (in large models), or a choice hangs
on them. So a draft's own head and embedding, which are copies of the target's, do not notice.
"""

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int8

from eagle3_jax.models.blocks import Linear
from eagle3_jax.models.experts import GroupedLinear
from eagle3_jax.models.weights import Params

_LARGEST = 127


@jax.jit
def quantise(weight: Float[Array, "*stack out in"]) -> tuple[Int8[Array, "*stack out in"], Float[Array, "*stack out"]]:
    """Codes and float32 scales of a kernel, or of a stack of kernels."""
    wide = jnp.asarray(weight, jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / _LARGEST
    codes = jnp.round(wide / jnp.where(scale == 0, 1, scale)[..., None])
    return codes.astype(jnp.int8), scale


def add_scales(model: nnx.Module) -> nnx.Module:
    """The model (made under `nnx.eval_shape`) with a `scale` beside every kernel that is to be quantised."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear | GroupedLinear) and path[:2] == ("model", "layers") and path[-1] != "gate":
            module.scale = nnx.data(nnx.Param(jnp.zeros(module.weight.shape[:-1])))
    return model


def quantised(placed: Iterable[tuple], shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple]:
    """The tensors of `Family.place`, each kernel that has a scale among `shapes` as its codes and its scale."""
    for name, array, *entry in placed:
        scale_name = _scale_of(name)
        if scale_name is None or scale_name not in shapes:
            yield name, array, *entry
            continue
        codes, scale = (
            np.asarray(part) for part in quantise(np.asarray(array))
        )  # on the host, to be placed from there
        yield name, codes, *entry
        yield scale_name, scale, *entry


def dense(params: Params) -> Params:
    """The parameters of a module (or of a whole model) with codes and scales multiplied out, in float32."""
    if "scale" in params:
        rest = {key: value for key, value in params.items() if key != "scale"}
        return rest | {"weight": params["weight"].astype(jnp.float32) * params["scale"][..., None]}
    return {key: dense(value) if isinstance(value, dict) else value for key, value in params.items()}


def _scale_of(name: str) -> str | None:
    """The name of a kernel's scale; None for what is no kernel."""
    layer, _, leaf = name.rpartition(".")
    return f"{layer}.scale" if leaf == "weight" else None
