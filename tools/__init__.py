"""Thin command lines over yatt_jax."""
