"""Algorithms: one file of pure functions each, which owns its ``Hyper`` and its ``Batch``. None imports another."""
