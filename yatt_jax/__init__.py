"""yatt_jax: a compiled RLHF trainer in JAX."""

__version__ = "0.1.0"
