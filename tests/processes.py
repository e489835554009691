"""Other processes in tests: started with this one's JAX settings, so that they find its compiled programs."""

import os

import jax


def environment() -> dict[str, str]:
    """Environment variables for a process that computes, bit by bit, what this one does."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }
