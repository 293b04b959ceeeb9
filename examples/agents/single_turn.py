"""The simplest agent: the whole document in one prompt, one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palimpsest.rl.llm import LLM
    from palimpsest.rl.trajectory import Problem


async def agent(sample: Problem, llm: LLM) -> str:
    """Ask once."""
    text = "".join(sample.document)  # a str, or a stream of them
    return await llm.chat([{"role": "user", "content": f"{text}\n\n{sample.question}"}])
