"""palimpsest.json: what was written is read, and what is no agent is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from palimpsest.engine import reading_file
from palimpsest.engine.config import AgentConfig, SamplingParams
from palimpsest.engine.errors import CheckpointError
from palimpsest.engine.templates import Template


def test_a_folder_gives_back_the_agent_that_was_written(tmp_path: Path) -> None:
    assert reading_file.read(tmp_path) == AgentConfig()
    template = Template.of(["Q ", "{problem}", " M ", "{memory}", " T ", "{chunk}"])
    agent = AgentConfig(500, 96, 24, template, "therefore", SamplingParams(temperature=0.0, top_p=0.9), True)
    reading_file.write(tmp_path, agent)
    assert reading_file.read(tmp_path) == agent


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens must be"),
        ({"chunk": 5}, "no 'chunk'"),
        ({"sampling": {"heat": 1}}, "heat"),
        ({"sampling": 1}, "sampling must be a mapping"),
        ({"template": "last"}, "template must be one of"),
    ],
)
def test_what_is_no_agent_is_refused(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    (tmp_path / "palimpsest.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=words):
        reading_file.read(tmp_path)
