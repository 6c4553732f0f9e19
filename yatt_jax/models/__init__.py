"""Models: flax.nnx modules, and the families of checkpoints they read and write."""
