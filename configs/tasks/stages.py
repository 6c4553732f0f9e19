"""How a file in ``configs/pipeline`` serves both as the list of its stages and as the config of each of them."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ml_collections import ConfigDict

# By name, in order: the config of a run, or the words of a command, as in ``python -m WORDS``. Each stage writes into a
# folder of its name, and names what it needs of earlier ones by their folders.
Stages: TypeAlias = Mapping[str, ConfigDict | list[str]]


def stage_config(get_stages: Callable[[str, str], Stages], folder: str, variant: str) -> ConfigDict:
    """The config that ``--config=FILE:STAGE[,VARIANT][,in=FOLDER]`` means.

    Args:
      get_stages: of the file: folder and variant to stages.
      folder: where stages lie if the variant does not say.
      variant: as above.

    Raises:
      ValueError: no such stage, one that is no run, or no such variant.
    """
    name, *rest = variant.split(",")
    chosen = ""
    for word in rest:
        if word.startswith("in="):
            folder = word.removeprefix("in=")
        elif not chosen:
            chosen = word
        else:
            raise ValueError(f"{variant!r}: expected STAGE[,VARIANT][,in=FOLDER]")
    stages = get_stages(folder, chosen)
    runs = [stage for stage, what in stages.items() if isinstance(what, ConfigDict)]
    config: Any = stages.get(name)
    if not isinstance(config, ConfigDict):
        what = f"{name!r} is a command, and no run" if name in stages else f"no stage {name!r}"
        raise ValueError(f"{what}; expected :STAGE[,VARIANT][,in=FOLDER], the runs are {runs}")
    return config.lock()
