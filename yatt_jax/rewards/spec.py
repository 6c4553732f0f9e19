"""How a configuration names a reward, and how the name becomes a function."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import pkgutil
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from yatt_jax.errors import InputError, nearest
from yatt_jax.typed import from_dict

if TYPE_CHECKING:
    from yatt_jax.types import Sample


@dataclasses.dataclass(frozen=True)
class Invalid:
    """Stands in a reward's result for a sample that cannot be judged: masked like None, and its reason is counted."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Failed:
    """Stands in a reward's result for a sample whose scoring failed, as if the function had raised for this one alone.

    It stops the run, or is masked and counted, as ``reward_on_error`` says.
    """

    reason: str


def is_path(text: str) -> bool:
    """Whether a text is an import path, as "package.module:function"."""
    return bool(re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text))


RewardFn: TypeAlias = "Callable[[list[Sample]], Iterable[float | Invalid | Failed | None]]"


@dataclasses.dataclass(frozen=True)
class ModelReward:
    """A trained reward model as a reward.

    Attributes:
      path: folder of a sequence-classification model, such as the export of a ``reward_model`` run; empty: none.
      weights: of each of the model's outputs in the score, such as those of attributes; empty: it has a single one.
      steps: how the probabilities that steps are right make a score, for a process reward model: "min", "mean",
        "product" or "last" of them. Empty: the outputs at the last token are the score.
      step_separator: what lies between steps.
      tokens: "ids" gives the model the ids that were sampled, "text" their text, rendered and tokenized its own way;
        "auto": ids where both models have the same vocabulary and no steps must be found, else text.
      max_tokens: longest text; longer ones are invalid. 0: as long as the longest row of the run.
    """

    path: str = ""
    weights: tuple[float, ...] = ()
    steps: Literal["", "min", "mean", "product", "last"] = ""
    step_separator: str = "\n"
    tokens: Literal["auto", "ids", "text"] = "auto"
    max_tokens: int = 0

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, self.weights)) or (self.weights and not any(self.weights)):
            raise ValueError(f"weights = {self.weights}: must be finite numbers, not all 0")
        if self.steps and self.weights:
            raise ValueError("steps and weights: the steps of a process reward model have one output; clear weights")
        if self.steps and self.tokens == "ids":
            raise ValueError("tokens = 'ids': steps are found in the text; use 'auto' or 'text'")
        if not self.step_separator:
            raise ValueError("step_separator is empty, so that no step could be told from the next")
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens = {self.max_tokens}: must not be negative")

    @classmethod
    def from_string(cls, path: str) -> ModelReward:
        """A model with a single output; lets a configuration name the folder alone."""
        return cls(path)


@dataclasses.dataclass(frozen=True)
class RewardSpec:
    """One reward of a run: a function or a reward model.

    Attributes:
      fn: import path ``"package.module:name"`` of a function, or of a frozen dataclass of settings whose ``open()``
        returns one; what that one has as ``close`` is called at the end of a run, and what it counts in ``counts``
        (see ``rewards.counts``) is reported.
      weight: of its values in the total. With 0 it is measured and does not count.
      mean, std: a value v counts as ``(v - mean) / std``. Measured on reference samples, they bring rewards of any
        origin to one scale before they are weighted; metrics show values as they are.
      kwargs: further keyword arguments of the function, or fields of the settings.
      chunk: samples a call; 0: all of the step's in one call. Set it for a function that judges each sample by itself
        and waits (for a server, say), so that ``reward_workers`` threads work on one step's samples.
      model: instead of ``fn``, a reward model on the run's devices.
      reference: responses of the starting policy to prompts of the training data; their mean becomes 0 and their
        standard deviation 1 in the total. 0: values count as they are.
    """

    fn: str = ""
    weight: float = 1.0
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    chunk: int = 0
    model: ModelReward = ModelReward()
    reference: int = 0
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if self.model.path:
            given = [name for name in ("fn", "kwargs", "chunk") if getattr(self, name)]
            if given:
                raise ValueError(f"model and {', '.join(given)}: a reward is a function or a model, and not both")
        elif not is_path(self.fn):
            raise ValueError(
                f"fn = {self.fn!r}: expected an import path, as 'yatt_jax.rewards.rules:exact_match' (or set model to "
                "the folder of a reward model)"
            )
        if not math.isfinite(self.weight):
            raise ValueError(f"weight = {self.weight}: must be a finite number")
        if not math.isfinite(self.mean):
            raise ValueError(f"mean = {self.mean}: must be a finite number")
        if not 0 < self.std < math.inf:
            raise ValueError(f"std = {self.std}: must be a number above 0")
        if self.chunk < 0:
            raise ValueError(f"chunk = {self.chunk}: must not be negative")
        if self.reference < 0 or self.reference == 1:
            raise ValueError(f"reference = {self.reference}: 0 (off), or at least 2 to have a standard deviation")
        if self.reference and (self.mean, self.std) != (0.0, 1.0):
            raise ValueError(f"reference = {self.reference} measures what mean and std say; set one of them")

    @classmethod
    def from_string(cls, fn: str) -> RewardSpec:
        """A reward of weight 1 without arguments; lets a configuration name the function alone."""
        return cls(fn)


def resolve(spec: RewardSpec, name: str) -> RewardFn:
    """Imports a reward's function and checks that it takes the configured arguments.

    Args:
      spec: of the reward.
      name: the reward's key in the configuration, for messages.

    Returns:
      The function with its keyword arguments bound, or what the settings open.

    Raises:
      InputError: no such module or function (the message has the nearest name), arguments that do not fit, or settings
        that cannot be used.
    """
    where = f"rewards.{name}.fn = {spec.fn!r}"
    function = load_function(spec.fn, where)
    if isinstance(function, type) and dataclasses.is_dataclass(function):
        return _open(function, spec.kwargs, f"rewards.{name}.kwargs", where)
    _check_arguments(function, spec.kwargs, f"rewards.{name}.kwargs", where)
    kwargs = dict(spec.kwargs)
    return cast("RewardFn", functools.partial(function, **kwargs))


def load_function(path: str, where: str) -> Callable[..., Any]:
    """Imports a function.

    Args:
      path: its import path.
      where: the key and value in the configuration, for messages.

    Raises:
      InputError: no such module or function; the message has the nearest name.
    """
    module_name, function_name = path.split(":")
    module = _import(module_name, where)
    if not hasattr(module, function_name):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise InputError(f"{where}: {module_name} has no {function_name!r}{_nearest(function_name, names)}")
    function: Any = getattr(module, function_name)
    if not callable(function):
        raise InputError(f"{where}: is {type(function).__name__}, and not a function")
    if inspect.iscoroutinefunction(function):
        raise InputError(f"{where}: is an async function; a reward returns its values, so run the loop inside of it")
    return function


def _open(settings: type, kwargs: Mapping[str, Any], key: str, where: str) -> RewardFn:
    faults: list[str] = []
    made: Any = from_dict(settings, kwargs, key, faults)
    if faults:
        raise InputError("\n".join(faults))
    if not hasattr(made, "open"):
        raise InputError(f"{where}: a dataclass of settings needs a method open(), which returns the reward function")
    try:
        return made.open()
    except InputError as error:
        raise InputError(f"{key}: {error}") from error


def _import(name: str, where: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(missing + "."):
            raise InputError(f"{where}: {name} needs the module {missing!r}, which is not installed") from error
        parent, _, last = missing.rpartition(".")
        found = pkgutil.iter_modules(importlib.import_module(parent).__path__ if parent else None)
        raise InputError(f"{where}: no module {missing!r}{_nearest(last, [m.name for m in found])}") from error
    except Exception as error:  # whatever a user's module does when imported
        raise InputError(f"{where}: importing {name} failed: {type(error).__name__}: {error}") from error


def _check_arguments(function: Callable[..., Any], kwargs: Mapping[str, Any], key: str, where: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in callables do not tell
        return
    parameters = list(signature.parameters.values())
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [p.name for p in parameters[1:] if p.kind in by_keyword]
    if not any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters):
        for argument in kwargs:
            if argument not in known:
                raise InputError(f"{key}.{argument}: {where} takes no such argument{_nearest(argument, known)}")
    missing = [p.name for p in parameters[1:] if p.kind in by_keyword and p.default is p.empty and p.name not in kwargs]
    if missing:
        raise InputError(f"{key}: {where} needs {', '.join(missing)}")
    try:
        signature.bind([], **kwargs)
    except TypeError as error:
        raise InputError(f"{where}: cannot be called as a reward, f(samples, **kwargs): {error}") from error


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    short = f"; it has {', '.join(names)}" if 0 < len(names) <= 12 else ""
    return nearest(name, names) or short
