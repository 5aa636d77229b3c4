"""Handlers with a third parameter: it gets the args as the model of its annotation, read before the handler starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import BaseModel

from fencepost.jobs.claim import Job
from fencepost.schemas.errors import ConfigError

__all__ = ["reading_args"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_HINT = "def handler(ctx: Context, job: Job) or def handler(ctx: Context, job: Job, args: Model)"


def reading_args(handler: Callable[..., Any]) -> Callable[[Any, Job], Any]:
    """The handler as one of two parameters; args that do not fit its model never reach it.

    Raises ConfigError for a third parameter that is no pydantic model, and for more that have no default.
    """
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError):
        return handler
    required = [each for each in parameters if each.kind in _POSITIONAL and each.default is inspect.Parameter.empty]
    if len(required) <= 2:
        return handler
    if len(required) > 3:
        raise ConfigError("the handler takes more than three parameters", field="handler", hint=_HINT)
    model = _annotation(handler, required[2].name)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise ConfigError(f"the parameter {required[2].name} is not annotated with a model", field="args", hint=_HINT)

    def call(ctx: Any, job: Job) -> Any:
        return handler(ctx, job, job.parse(model))

    return call


def _annotation(handler: Callable[..., Any], name: str) -> object:
    function = inspect.unwrap(handler)
    try:
        # Only this annotation is resolved: others may name what exists for type checkers alone.
        names: dict[str, Any] = {"args": getattr(function, "__annotations__", {}).get(name)}
        made = type("annotated", (), {"__annotations__": names})
        scope = dict(getattr(function, "__globals__", {})) | dict(inspect.getclosurevars(function).nonlocals)
        return get_type_hints(made, globalns=scope)["args"]
    except (NameError, TypeError, KeyError) as error:
        raise ConfigError(
            f"the annotation of {name} cannot be resolved: {error}",
            field="args",
            hint="import the model where the handler is defined",
        ) from None
