"""named: a user's function by its name, "module:function"."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..engine.errors import ConfigError

__all__ = ["named"]


def named(name: str) -> Callable[..., Any]:
    """Import "module:function". Modules are looked for where Python does and in the working directory.

    Raises ConfigError for a name of another form, a module that cannot be imported and what is no function of it.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ConfigError(f"a function is named as 'module:function', got {name!r}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # a module is a program of the user's and may raise anything
        raise ConfigError(f"{name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigError(f"module {module!r} has no function {function!r}; it has {found!r} of that name")
    return found  # type: ignore[no-any-return]
