"""Serves a reward model, a critic or a judge over HTTP: ``python -m yatt_jax.serve``; see ``__main__``."""
