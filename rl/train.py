"""The command `palimpsest train`: a run from a YAML file."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..engine.errors import ConfigError
from .config_file import load_config
from .process_group import ProcessGroup
from .run import Run
from .supervised_run import SupervisedRun
from .termination import Terminated

__all__ = ["run"]


def run(path: str, changes: Sequence[str], resume: bool, replay: str | None = None) -> int:
    """Carry out the command; -> exit code: 0, 143 after SIGTERM, 130 after Ctrl-C. Raises PalimpsestError."""
    config = load_config(path, changes)
    with ProcessGroup.start(config.parallel.tensor, config.parallel.timeout) as ranks:
        run: Run | SupervisedRun
        if config.objective == "sft":
            if replay or ranks.size * config.parallel.tensor > 1:
                raise ConfigError("objective 'sft' runs in one process, without --replay; start it without torchrun")
            run = SupervisedRun(config, resume=resume)
        else:
            run = Run(config, resume=resume, replay=replay, process_group=ranks)
        try:
            run.train()
        except Terminated as error:
            if ranks.main:
                saved = run.checkpoints.all()[-1]
                print(f"palimpsest: {error}; saved {saved}, --resume goes on from it", file=sys.stderr)
            return error.exit_code
    return 0
