"""A reward model, a critic or a judge over HTTP.

Command:   python -m yatt_jax.serve --config=configs/serve/model.py --config.path=runs/reward_model/export \
               --role=reward --port=8000
Hardware:  whatever holds the model; the command uses every device of the machine.
"""

from ml_collections import ConfigDict

from yatt_jax.serve.config import default_config


def get_config() -> ConfigDict:
    """The config; ``path`` is to be given."""
    config = default_config()
    config.batch.rows = 32
    config.batch.delay_ms = 5.0
    config.limits.tokens = 1024
    return config.lock()
