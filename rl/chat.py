"""Chat prompts in token ids: what the model said goes back as the ids that it drew, never re-tokenised."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence

from ..engine.errors import RequestError
from ..engine.reading import Turn
from ..engine.sequence import Segment
from ..engine.tokenizer import Tokenizer

__all__ = ["Reply", "chat_segments"]


class Reply(str):
    """What the model answered, as text. As the content of a message it stands in the prompt by its own ids.

    Text made of it (stripped, cut, joined with other text) is text like any other. turn: prompt and response.
    """

    turn: Turn

    def __new__(cls, turn: Turn) -> Reply:
        reply = super().__new__(cls, turn.text)
        reply.turn = turn
        return reply

    def __reduce__(self) -> tuple[type[Reply], tuple[Turn]]:
        return Reply, (self.turn,)

    @property
    def ids(self) -> array[int]:
        """Int32 ids of the response without what ended it: EOS, stop id or stop string."""
        return self.turn.response_ids[: self.turn.text_tokens]


def chat_segments(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer) -> list[Segment]:
    """The prompt of a conversation ({"role", "content"}): the chat template's pieces, contents spliced in between.

    Contents stand as they are (a template that would trim them, or drop earlier thoughts, doesn't get to), and text in
    them never becomes a control token. So a conversation that goes on begins with the ids that were there before.
    Raises RequestError for what is no message, and when the template doesn't hand all messages on in order.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages are a list of {{'role', 'content'}}, got {messages!r:.60}")
    for message in messages:
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise RequestError(f"a message has the keys 'role' and 'content' and no others, got {message!r:.60}")
        if not all(isinstance(value, str) for value in message.values()):
            raise RequestError(f"role and content of a message are str, got {message!r:.60}")
    marks = [f"\ue000{i}\ue001" for i in range(len(messages))]
    rendered = tokenizer.chat(
        [{"role": message["role"], "content": mark} for message, mark in zip(messages, marks, strict=True)]
    )
    pieces = re.split("(\ue000[0-9]+\ue001)", rendered)
    if pieces[1::2] != marks:
        roles = ", ".join(message["role"] for message in messages)
        raise RequestError(f"the chat template doesn't hand on each message once and in order (roles: {roles})")
    prompt = [Segment("template", tokenizer.encode_template(pieces[0]))]
    for message, piece in zip(messages, pieces[2::2], strict=True):
        content = message["content"]
        ids = content.ids if isinstance(content, Reply) else tokenizer.encode(content)
        prompt += [Segment("message", ids), Segment("template", tokenizer.encode_template(piece))]
    return prompt
