"""What `module:name` on a command line means: imported once, refused in one line when it is not there."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from fencepost.schemas.errors import ConfigError

__all__ = ["load", "module"]


def load(path: str, what: str) -> object:
    """The object that `module:name` names, looked for from the current folder too; ConfigError says what is wrong.

    An error raised by the module itself is told by its class and, for a failed import or syntax, its message.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(f"{path!r} does not name a {what}", field="target", hint=f"write module:{what}")
    found: object = module(module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{module_name} has no {name}", field="target", hint="check the name after the colon")
        found = getattr(found, part)
    return found


def module(name: str) -> ModuleType:
    """The module of that name, looked for from the current folder too; ConfigError says what is wrong."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ConfigError:
        raise
    except (ImportError, SyntaxError) as error:
        text = error.msg or type(error).__name__
        raise ConfigError(
            f"{name} cannot be imported: {text}", field="target", hint="run in its folder, or install it"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{name} raised {type(error).__name__} when it was imported",
            field="target",
            hint=f"see it with: python -c 'import {name}'",
        ) from error
