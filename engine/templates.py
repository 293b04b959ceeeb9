"""Prompts as data: fixed text and slots, rendered once with the model's chat template, then filled with token ids."""

from __future__ import annotations

import enum
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from .errors import ConfigError, RequestError
from .sequence import Segment

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

__all__ = ["FINAL_FORMS", "FIRST_MEMORY", "TEMPLATES", "Slot", "Template", "TokenTemplate", "find_final", "find_update"]

FIRST_MEMORY = "No previous memory"


class Slot(enum.StrEnum):
    """A place in a prompt that each turn fills anew."""

    PROBLEM = "problem"
    MEMORY = "memory"
    CHUNK = "chunk"


@dataclass(frozen=True)
class Template:
    """One user message: fixed texts and slots in order.

    Control tokens spelled out in a fixed text count as control tokens; in what fills a slot they never do.
    Raises ConfigError for a part that is neither text nor a Slot, for no slot at all and for a slot that stands twice.
    """

    parts: tuple[str | Slot, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        for part in self.parts:
            if not isinstance(part, str):
                raise ConfigError(f"a template's parts are texts and Slots, got {part!r}")
        if not self.slots:
            raise ConfigError("a template needs at least one Slot")
        for slot in Slot:
            if self.slots.count(slot) > 1:
                raise ConfigError(f"the slot {slot.value!r} stands more than once in a template; keep one")

    @property
    def slots(self) -> list[Slot]:
        return [part for part in self.parts if isinstance(part, Slot)]

    @classmethod
    def of(cls, parts: Sequence[str | Slot]) -> Template:
        """From a list, as in a YAML file: the parts "{problem}", "{memory}" and "{chunk}" of it are slots."""
        slots: dict[str, Slot] = {f"{{{slot.value}}}": slot for slot in Slot}
        return cls(tuple(slots.get(part, part) if isinstance(part, str) else part for part in parts))


# The wording and white space of MemAgent's prompts (arXiv 2507.02259, code of the authors): the published weights were
# trained on them byte for byte, the space after <problem> and the last line break included.
_READ = (
    "You are presented with a problem, a section of an article that may contain the answer to the problem, "
    "and a previous memory. Please read the provided section carefully and update the memory with the new information "
    "that helps to answer the problem. Be sure to retain all relevant details from the previous memory "
    "while adding any new, useful information.\n\n"
)
_ANSWER = (
    "You are presented with a problem and a previous memory. "
    "Please answer the problem based on the previous memory and "
)
_PROBLEM = ("<problem> \n", Slot.PROBLEM, "\n</problem>\n\n")
_MEMORY = ("<memory>\n", Slot.MEMORY, "\n</memory>\n\n")
_CHUNK = ("<section>\n", Slot.CHUNK, "\n</section>\n\n")


def _final(request: str) -> Template:
    return Template((_ANSWER + request + "\n\n", *_PROBLEM, *_MEMORY, "Your answer:\n"))


TEMPLATES: Mapping[str, Template] = MappingProxyType(
    {
        "memory_first": Template((_READ, *_PROBLEM, *_MEMORY, *_CHUNK, "Updated memory:\n")),
        "chunk_first": Template((_READ, *_PROBLEM, *_CHUNK, *_MEMORY, "Updated memory:\n")),
    }
)
FINAL_FORMS: Mapping[str, Template] = MappingProxyType(
    {
        "boxed": _final(r"put the answer in \boxed{}."),
        "boxed_trained": _final(r"put the answer in \boxed{{}}."),
        "therefore": _final('format your response as follows "Therefore, the answer is (insert answer here)".'),
    }
)


def find_update(template: str | Template | Sequence[str]) -> Template:
    """The template of the turns that write the memory, by name or as given.

    Raises ConfigError for an unknown name and for a template that lacks one of the three slots.
    """
    return _find("template", template, TEMPLATES, {Slot.PROBLEM, Slot.MEMORY, Slot.CHUNK})


def find_final(form: str | Template | Sequence[str]) -> Template:
    """The template of the turn that answers, by name or as given.

    Raises ConfigError for an unknown name and for a template whose slots are not just problem and memory.
    """
    return _find("final_form", form, FINAL_FORMS, {Slot.PROBLEM, Slot.MEMORY})


def _find(key: str, given: str | Template | Sequence[str], known: Mapping[str, Template], slots: set[Slot]) -> Template:
    if isinstance(given, (list, tuple)):
        given = Template.of(given)
    if isinstance(given, Template):
        if set(given.slots) != slots:
            needed = ", ".join(sorted(slots))
            found = ", ".join(given.slots) or "none"
            raise ConfigError(f"AgentConfig.{key} needs exactly the slots {needed}; the template given has {found}")
        return given
    if not isinstance(given, str) or given not in known:
        raise ConfigError(
            f"AgentConfig.{key} must be one of {', '.join(known)}, a Template or the list of its parts; got {given!r}"
        )
    return known[given]


class TokenTemplate:
    """A template in one model's tokens: fixed pieces tokenised once, slots filled with ids and never re-tokenised.

    As in MemAgent's training code the chat template is rendered once around placeholders and split there. Segments are
    called by their slot; fixed pieces are "head", "before_<slot>" and "tail".

    fixed_tokens: tokens of a prompt whose slots are empty.
    """

    def __init__(self, template: Template, tokenizer: Tokenizer) -> None:
        """Raises ConfigError without a chat template, and when it doesn't hand the message on whole, slots in order."""
        marks = {slot: f"\ue000{slot.value}\ue001" for slot in template.slots}
        message = "".join(marks[part] if isinstance(part, Slot) else part for part in template.parts)
        try:
            rendered = tokenizer.chat([{"role": "user", "content": message}])
        except RequestError as error:
            raise ConfigError(f"no prompt can be made for this model: {error}") from error
        pieces = re.split(f"({'|'.join(marks.values())})", rendered)
        if pieces[1::2] != list(marks.values()):
            raise ConfigError(
                "the chat template does not keep the user message in one piece, or the template's text holds a "
                f"placeholder (\\ue000...\\ue001): slots {', '.join(template.slots)} came out as {pieces[1::2]!r}"
            )
        names = ["head", *(f"before_{slot.value}" for slot in template.slots[1:]), "tail"]
        self._fixed = [
            Segment(name, tokenizer.encode_template(text)) for name, text in zip(names, pieces[::2], strict=True)
        ]
        self._slots = template.slots
        self.fixed_tokens = sum(len(segment.ids) for segment in self._fixed)

    def fill(self, values: Mapping[Slot, array[int]]) -> list[Segment]:
        """The prompt with these ids (int32) in its slots; an empty slot keeps its (empty) segment."""
        prompt: list[Segment] = []
        for segment, slot in zip(self._fixed, self._slots, strict=False):
            prompt += [segment, Segment(slot.value, values[slot])]
        return [*prompt, self._fixed[-1]]
