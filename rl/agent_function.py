"""FunctionAgent: any `async def agent(sample, llm)` as an agent that can be trained."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice, tee

from ..engine.config import SamplingParams, _require, _require_number
from ..engine.engine import Engine
from ..engine.errors import ConfigError
from .agent_loop import AgentLoop
from .failures import Failures
from .live_agent import AgentFunction, LiveAgent
from .llm import LLM
from .named import named
from .trajectory import Episode, Problem

__all__ = ["FunctionAgent", "FunctionConfig"]


@dataclass(frozen=True)
class FunctionConfig:
    """function: takes (sample, llm), the Problem and an LLM, or its name as "module:function".

    sampling: of every call; a call may name its own max_tokens and stop. timeout: seconds that the function may wait
    for anything but the model, from one call to the next.
    """

    function: str | AgentFunction
    sampling: SamplingParams = field(default_factory=SamplingParams)
    timeout: float = 300.0

    LONGEST_TIMEOUT = 1e6

    def __post_init__(self) -> None:
        _require(
            isinstance(self.function, str) or callable(self.function),
            f"FunctionConfig.function must be an async function or 'module:function', got {self.function!r}",
        )
        _require(
            isinstance(self.sampling, SamplingParams),
            f"FunctionConfig.sampling must be SamplingParams, got {self.sampling!r}",
        )
        _require(
            not self.sampling.top_logprobs and not self.sampling.prompt_logprobs,
            "FunctionConfig.sampling must leave out top_logprobs and prompt_logprobs: a Turn has no place for them",
        )
        _require_number("FunctionConfig", "timeout", self.timeout, 0.0, self.LONGEST_TIMEOUT, open_low=True)


class FunctionAgent:
    """Runs a function on problems, many side by side in one event loop, with the steps of one engine.

        async def agent(sample, llm):
            return await llm.chat([{"role": "user", "content": sample.question}])

    What the function returns is the answer, a text for the reward, or a number, which is the reward. Every call of the
    model is a turn; only what the model drew is trained on, whatever else stands in the prompts.

    Nothing the function does ends a rollout; what fails counts 0 and is trained on as far as it got.
    failures: by name. "raised": an exception, or it ended itself. "window": a prompt that doesn't fit. "timeout": it
    waited too long. "no_call": it asked the model nothing. "result": neither text nor a finite number.
    A function that blocks (time.sleep, a long computation) holds everything up and has no timeout: use
    asyncio.to_thread for such work.
    """

    def __init__(self, engine: Engine, config: FunctionConfig) -> None:
        """Raises ConfigError for a function that can't be found or is not async, and for a model in parts."""
        if not isinstance(config, FunctionConfig):
            raise ConfigError(f"a function agent's configuration is a FunctionConfig, got {config!r:.60}")
        if engine.parallel is not None:
            raise ConfigError(
                "an agent's function may take its time on each rank, and ranks that hold parts of one model must take "
                "the same steps; give each rank the whole model (data parallel), or use a MemoryAgent"
            )
        self.engine, self.config = engine, config
        self._function = named(config.function) if isinstance(config.function, str) else config.function
        if not any(map(inspect.iscoroutinefunction, (self._function, type(self._function).__call__))):
            raise ConfigError(f"an agent is an async function (async def agent(sample, llm)), got {config.function!r}")
        self.failures = Failures("an agent", "such trajectories count 0")

    def run(self, problem: Problem, *, sample: int = 0) -> Episode:
        """Work on one problem."""
        return next(episode for *_, episode in self.episodes([problem], 1, first_sample=sample))

    def episodes(
        self, problems: Iterable[Problem], n: int, *, first_sample: int = 0, stride: int | None = None
    ) -> Generator[tuple[int, int, Episode], None, None]:
        """Work on each of many problems n times; -> (number of the problem, place in its group, episode) as they end.

        Run i of problem t has the sample index first_sample + t * stride + i; stride is n where it is not given.
        Problems are taken as places become free, as many as the engine has for sequences. Closing the generator ends
        what is under way. Raises RequestError where an event loop runs already, and when a response ends in an error of
        the engine's.
        """
        stride = n if stride is None else stride
        arriving = enumerate(copy for problem in problems for copy in _copies(problem, n))
        most = self.engine.config.max_sequences
        with closing(AgentLoop(self.engine, self.config.timeout)) as loop:
            while True:
                for place, problem in islice(arriving, most - len(loop)):
                    llm = LLM(loop, self.config.sampling, first_sample + place // n * stride + place % n)
                    loop.start(LiveAgent(self._function, problem, llm, place))
                if not len(loop):
                    return
                for agent in loop.advance():
                    if agent.failure is not None:
                        self.failures.note(*agent.failure)
                    yield (*divmod(agent.place, n), agent.episode())


def _copies(problem: Problem, n: int) -> Iterator[Problem]:
    """One for each run: a document that is a stream can be read once only."""
    if isinstance(problem.document, str):
        yield from [problem] * n
    else:
        for document in tee(problem.document, n):
            yield dataclasses.replace(problem, document=document)
