"""The memory agent as a function: with the same limits it draws what palimpsest.MemoryAgent draws, bit for bit.

MemoryAgent is the faster one: it prefills the next prompt while a memory is being written.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from palimpsest.engine.reading import Chunks
from palimpsest.engine.templates import FIRST_MEMORY, Slot, TokenTemplate, find_final, find_update

if TYPE_CHECKING:
    from palimpsest.rl.llm import LLM
    from palimpsest.rl.trajectory import Problem

CHUNK_TOKENS, MEMORY_TOKENS, ANSWER_TOKENS = 5000, 1024, 1024


async def agent(sample: Problem, llm: LLM) -> str:
    """Read chunk by chunk, overwrite the memory after each, answer from the memory alone."""
    tokenizer = llm.tokenizer
    update = TokenTemplate(find_update("chunk_first"), tokenizer)
    final = TokenTemplate(find_final("boxed"), tokenizer)
    document = [sample.document] if isinstance(sample.document, str) else sample.document
    question, memory = tokenizer.encode(sample.question), tokenizer.encode(FIRST_MEMORY)

    def slots(chunk: array[int]) -> dict[Slot, array[int]]:
        return {Slot.PROBLEM: question, Slot.MEMORY: memory, Slot.CHUNK: chunk}

    for chunk in Chunks(tokenizer.encode_pieces(document), CHUNK_TOKENS):
        memory = (await llm.complete(update.fill(slots(chunk)), max_tokens=MEMORY_TOKENS)).ids
    return await llm.complete(final.fill(slots(array("i"))), max_tokens=ANSWER_TOKENS)
