"""The three configurations of the engine: frozen, validated where they are made, unknown keys refused."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from .errors import ConfigError

if TYPE_CHECKING:
    from .templates import Template

__all__ = ["AgentConfig", "EngineConfig", "SamplingParams", "from_mapping"]

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

DTYPES = {"float32": 32, "bfloat16": 16, "float64": 64}  # their bits
KV_DTYPES = (*DTYPES, "int8", "fp8")
BACKENDS = ("auto", "cpu", "triton", "reference")
ATTENTION = ("auto", "triton", "cuda", "flashinfer", "reference")
QUANTISED = ("int8", "int8-g128", "int8-g64", "int8-g32", "int4", "int4-g128", "int4-g64", "int4-g32")
WEIGHTS = ("native", *QUANTISED, "fp8", "file")
MEMORY_KV = ("exact", "carried")
ROPE_TYPES = ("linear", "llama3", "yarn")


def from_mapping(cls: type[T], values: Mapping[str, Any]) -> T:
    """Make a configuration dataclass from a mapping (parsed JSON or YAML) whose values are as the class takes them.

    Raises ConfigError for a key that the class does not have, naming the nearest one.
    """
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"{cls.__name__} has no key {key!r}; {hint}")
    return cls(**values)


class FrozenDict(dict[K, V]):
    """A dict that nobody changes, so that a configuration that holds it can be hashed and shared."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type, tuple[dict[K, V]]]:
        return type(self), (dict(self),)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("a configuration does not change; make a new one with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_int(owner: str, name: str, value: object, low: int) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low
    _require(ok, f"{owner}.{name} must be a whole number of at least {low}, got {value!r}")


def _require_bool(owner: str, name: str, value: object) -> None:
    _require(isinstance(value, bool), f"{owner}.{name} must be True or False, got {value!r}")


def _require_number(owner: str, name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    ok = ok and (low < value if open_low else low <= value) and value <= high  # type: ignore[operator]
    bracket = "(" if open_low else "["
    _require(ok, f"{owner}.{name} must be a number in {bracket}{low}, {high}], got {value!r}")


def _require_choice(owner: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    _require(value in choices, f"{owner}.{name} must be one of {', '.join(choices)}, got {value!r}")


def _tuple(owner: str, name: str, value: object) -> tuple[Any, ...]:
    _require(isinstance(value, (list, tuple)), f"{owner}.{name} must be a list or tuple, got {value!r}")
    return tuple(value)  # type: ignore[arg-type]


def _frozen(owner: str, name: str, value: object) -> FrozenDict[Any, Any]:
    _require(isinstance(value, Mapping), f"{owner}.{name} must be a mapping, got {value!r}")
    return FrozenDict(value)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class EngineConfig:
    """How an engine holds a model and schedules its work.

    dtype: element type of the parameters. With "bfloat16" activations and sums stay float32.
    weights: how linear layers keep their weights: "native" is `dtype`; "int8" (a scale per row), "int8-gN" and
    "int4-gN" (a scale per N neighbours, "int4" is "int4-g32") round them when the model is loaded, and so does "fp8"
    (e4m3, a scale per row); "file" takes the integers of a GGUF file as they are. A GPU takes "native", "int8" and
    "fp8", a CPU all but "fp8". Other than "native" is for inference only.
    kv_dtype: element type of the KV pages; None means that of the activations. "int8" rounds each token's key and value
    of each head to 8 bits with a float32 scale of its own, on a CPU; "fp8" rounds them to e4m3 without a scale, at most
    448, on a GPU. Both are for inference only.
    backend: "auto" takes the fastest kernels this machine has, "reference" plain torch, "cpu" the C++ kernels and
    "triton" those of an NVIDIA GPU, or an error.
    attention: on a GPU, the kernels of attention: "triton", "cuda" (C++ for single rows, which must be built, with
    bfloat16 KV and heads of 64 or 128; before Hopper not where long prompts may begin alike), "flashinfer" (the
    package, with bfloat16 KV, for inference), "reference" (plain torch, slow, for inference: to tell whether a kernel
    is at fault), or "auto", "cuda" where it can run and else "triton".
    exact: on a GPU, only kernels in which a row's bits do not depend on what else is computed at the same time, so that
    drafts, batches and cut prompts change nothing. The CPU kernels are always so.
    graphs: on a GPU, replay small steps as CUDA graphs, which are recorded when the engine is made: the same results
    where kernels are exact, sooner. Not with FlashInfer, plain torch's attention, adapters or several ranks.
    page_size: token slots per page.
    kv_bytes: size of the KV pool in bytes; None sizes it by kv_share.
    kv_share: share of the memory that is free after loading; never more than max_sequences full windows.
    max_step_tokens: most tokens that one step computes, over all sequences.
    max_sequences: most sequences that run at once; the others wait.
    open_prompt: a memory agent's next prompt is prefilled while the turn before it decodes: the same results, sooner.
    max_context: window in tokens (prompt + response); None means the model's own.
    drafts: guess from prompt and memory how a response goes on, and verify many tokens in one step. The results are the
    same with and without; where they would not be (on a GPU without `exact`, in plain torch), nothing is drafted.
    rope_scaling: a mapping as in a model's config.json, e.g. {"rope_type": "yarn", "factor": 4.0}; replaces the
    model's.
    threads: CPU threads for torch and the kernels (process-wide, as torch's setting is), at most 1024; None leaves
    torch's choice.
    """

    dtype: str = "float32"
    weights: str = "native"
    kv_dtype: str | None = None
    backend: str = "auto"
    attention: str = "auto"
    exact: bool = False
    graphs: bool = True
    page_size: int = 16
    kv_bytes: int | None = None
    kv_share: float = 0.3
    max_step_tokens: int = 2048
    max_sequences: int = 64
    open_prompt: bool = True
    max_context: int | None = None
    drafts: bool = True
    rope_scaling: Mapping[str, Any] | None = None
    threads: int | None = None

    MOST_THREADS: ClassVar[int] = 1024

    def __post_init__(self) -> None:
        _require_choice("EngineConfig", "dtype", self.dtype, tuple(DTYPES))
        _require_choice("EngineConfig", "weights", self.weights, WEIGHTS)
        if self.kv_dtype is not None:
            _require_choice("EngineConfig", "kv_dtype", self.kv_dtype, KV_DTYPES)
        _require_choice("EngineConfig", "backend", self.backend, BACKENDS)
        _require_choice("EngineConfig", "attention", self.attention, ATTENTION)
        _require_bool("EngineConfig", "exact", self.exact)
        _require_bool("EngineConfig", "graphs", self.graphs)
        _require_number("EngineConfig", "kv_share", self.kv_share, 0.0, 1.0, open_low=True)
        for name in ("page_size", "max_step_tokens", "max_sequences"):
            _require_int("EngineConfig", name, getattr(self, name), 1)
        _require(
            self.max_sequences <= self.max_step_tokens,
            f"EngineConfig.max_sequences ({self.max_sequences}) must not exceed max_step_tokens "
            f"({self.max_step_tokens}): each running sequence computes at least one token a step",
        )
        _require_bool("EngineConfig", "drafts", self.drafts)
        for name in ("kv_bytes", "max_context", "threads"):
            if getattr(self, name) is not None:
                _require_int("EngineConfig", name, getattr(self, name), 1)
        _require(
            self.threads is None or self.threads <= self.MOST_THREADS,
            f"EngineConfig.threads must be at most {self.MOST_THREADS}, got {self.threads}",
        )
        _require_bool("EngineConfig", "open_prompt", self.open_prompt)
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", _frozen("EngineConfig", "rope_scaling", self.rope_scaling))
            kind = self.rope_scaling.get("rope_type", self.rope_scaling.get("type"))
            _require_choice("EngineConfig", "rope_scaling['rope_type']", kind, (*ROPE_TYPES, "default"))

    @property
    def weight_bits(self) -> int:
        """Of a weight in memory; files with integers of their own count as int4."""
        if self.weights == "native":
            return DTYPES[self.dtype]
        return 8 if self.weights.startswith(("int8", "fp8")) else 4


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one response are drawn.

    Filters apply in this order: penalties and bias, min_tokens, temperature, top_k, top_p, min_p.
    temperature: 0 is greedy, else at least 1e-5, since logits divided by less overflow. top_k: 0 is off. top_p: 1 is
    off. min_p: 0 is off.
    repetition_penalty: divides positive and multiplies negative logits of ids seen in prompt or response (CTRL, arXiv
    1909.05858).
    presence_penalty, frequency_penalty: subtracted once, or once per occurrence, for ids of the response.
    logit_bias: added to the logits of the ids named.
    stop: strings that end the response; the text is cut before the first of them. That text has no special tokens: to
    stop at one of those name it in stop_ids. stop_ids: token ids that end the response, as EOS does.
    min_tokens: EOS and stop ids cannot be drawn before this many tokens; stop strings are not looked for.
    ignore_eos: EOS is a token like any other.
    seed: with the sample index, the turn index and the index in the response it fixes each random number.
    top_logprobs: how many of the likeliest tokens to report per position, 0 for none.
    prompt_logprobs: report the log-probability of each prompt token (raw logits); at admission nothing of such a prompt
    is taken from the cache.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=FrozenDict)
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 256
    ignore_eos: bool = False
    seed: int = 0
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    LARGEST_TOP_LOGPROBS: ClassVar[int] = 1024
    LOWEST_TEMPERATURE: ClassVar[float] = 1e-5

    @property
    def penalises(self) -> bool:
        """Whether a penalty is on, so that the ids before a token matter."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def __post_init__(self) -> None:
        owner = "SamplingParams"
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple(owner, "stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_ids", _tuple(owner, "stop_ids", self.stop_ids))
        object.__setattr__(self, "logit_bias", _frozen(owner, "logit_bias", self.logit_bias))
        _require_number(owner, "temperature", self.temperature, 0.0, 100.0)
        _require(
            self.temperature == 0 or self.temperature >= self.LOWEST_TEMPERATURE,
            f"{owner}.temperature must be 0 (greedy) or at least {self.LOWEST_TEMPERATURE}, got {self.temperature}: "
            "logits divided by less overflow",
        )
        _require_number(owner, "top_p", self.top_p, 0.0, 1.0, open_low=True)
        _require_number(owner, "min_p", self.min_p, 0.0, 1.0)
        _require_number(owner, "repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _require_number(owner, "presence_penalty", self.presence_penalty, -100.0, 100.0)
        _require_number(owner, "frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        for name in ("top_k", "min_tokens", "top_logprobs"):
            _require_int(owner, name, getattr(self, name), 0)
        _require_int(owner, "max_tokens", self.max_tokens, 1)
        _require_int(owner, "seed", self.seed, 0)
        _require(self.seed < 2**64, f"{owner}.seed must be below 2**64, got {self.seed}")
        _require(
            self.min_tokens <= self.max_tokens,
            f"{owner}.min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
        )
        _require(
            self.top_logprobs <= self.LARGEST_TOP_LOGPROBS,
            f"{owner}.top_logprobs must be at most {self.LARGEST_TOP_LOGPROBS}, got {self.top_logprobs}",
        )
        for name in ("ignore_eos", "prompt_logprobs"):
            _require_bool(owner, name, getattr(self, name))
        for text in self.stop:
            _require(isinstance(text, str) and text != "", f"{owner}.stop must hold non-empty strings, got {text!r}")
        for i, token in enumerate(self.stop_ids):
            _require_int(owner, f"stop_ids[{i}]", token, 0)
        for token, bias in self.logit_bias.items():
            _require_int(owner, "logit_bias key", token, 0)
            _require_number(owner, f"logit_bias[{token}]", bias, -1e4, 1e4)


@dataclass(frozen=True)
class AgentConfig:
    """How a memory agent reads (defaults: MemAgent, arXiv 2507.02259).

    chunk_tokens, memory_tokens, answer_tokens: tokens read per turn, and the limits of a memory and of the answer.
    template: how a turn asks for a memory; a name from templates.TEMPLATES, a Template, or the list of its parts with
    "{problem}", "{memory}" and "{chunk}" for the slots.
    final_form: how the last turn asks for the answer; a name from templates.FINAL_FORMS, a Template, or such a list.
    sampling: drawn for every turn; its max_tokens is replaced by memory_tokens or answer_tokens.
    strip_thinking: a memory is what follows the last </think>, from the first token wholly after the tag on: line
    breaks in one token with its end go with it. Without the tag, as when the limit cut the thinking, all of it is kept,
    as in MemAgent's evaluation: an empty memory would lose everything read before.
    memory_kv: "exact" computes a memory's KV in the prompt that it stands in. "carried" moves the KV with which it was
    written there instead, all but the first tokens: approximate, not for training, without open prompts and resuming;
    how much is carried, and so the result, may depend on what else the engine does.
    keep_turns: keep every turn's ids and text in the Reading; without it only counters stay in memory.
    """

    chunk_tokens: int = 5000
    memory_tokens: int = 1024
    answer_tokens: int = 1024
    template: str | Template | Seq[str] = "memory_first"
    final_form: str | Template | Seq[str] = "boxed"
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.7, top_p=0.95))
    strip_thinking: bool = False
    memory_kv: str = "exact"
    keep_turns: bool = True

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "memory_tokens", "answer_tokens"):
            _require_int("AgentConfig", name, getattr(self, name), 1)
        for name in ("strip_thinking", "keep_turns"):
            _require_bool("AgentConfig", name, getattr(self, name))
        _require_choice("AgentConfig", "memory_kv", self.memory_kv, MEMORY_KV)
        _require(
            isinstance(self.sampling, SamplingParams),
            f"AgentConfig.sampling must be SamplingParams, got {self.sampling!r}",
        )
        _require(
            not self.sampling.top_logprobs and not self.sampling.prompt_logprobs,
            "AgentConfig.sampling must leave out top_logprobs and prompt_logprobs: a Turn has no place for them",
        )
        from .templates import Template, find_final, find_update  # made of segments, which know SamplingParams

        for name, find in (("template", find_update), ("final_form", find_final)):
            given = getattr(self, name)
            find(given)
            if isinstance(given, list):  # a configuration does not change, nor what it holds
                object.__setattr__(self, name, Template.of(given))
