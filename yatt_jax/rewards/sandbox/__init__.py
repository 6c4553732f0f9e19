"""Programs that nobody trusts, run where they can do no harm. ``keeper.py`` and what it imports run on their own."""

from yatt_jax.rewards.sandbox.run import Limits, Outcome, Sandbox, SandboxError

__all__ = ["Limits", "Outcome", "Sandbox", "SandboxError"]
