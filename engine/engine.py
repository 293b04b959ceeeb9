"""Engine: requests in, tokens and text out, one step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import checkpoint
from .acceptance import Acceptance, StepCost
from .carried import Carried
from .config import EngineConfig, SamplingParams
from .detokenizer import TextStream
from .draft import Drafter
from .errors import ConfigError, RequestError
from .kv_cache import PagePool
from .loaded_model import LoadedModel
from .outbox import Outbox
from .parallel import whole_parameters
from .prompt import Prompt, pair_with_params, prompt_ids, segments_of
from .sampler import check_params
from .scheduler import Scheduler
from .sequence import Completion, Segment, Sequence
from .stream import Stream, Update, require_delivery, without_error

__all__ = ["Engine"]


class Engine:
    """A model with its KV pool and queue. Several engines can live in one process; one engine belongs to one thread.

    window: most tokens of prompt and response that the model takes. longest: most that one request can have here, where
    the KV pool may hold less. drafts: whether responses are drafted, which changes only how many steps they take.
    step_cost: what a longer draft costs here, for an Acceptance that several requests share. tokenizer_folder: of its
    files. graph_bytes: what CUDA graphs take of the GPU's memory.
    """

    def __init__(
        self,
        model_path: str | Path,
        config: EngineConfig | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Load a Hugging Face folder or a GGUF file, and quantise it as `config.weights` says.

        process_group: split the model over these ranks (tensor parallel). Each of them makes such an engine and then
        makes the same calls in the same order, see parallel.py; all get the same results.
        Raises CheckpointError for files that cannot be run, ConfigError for a configuration that this model, machine or
        group cannot meet.
        """
        self.config = config = EngineConfig() if config is None else config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        loaded = LoadedModel.load(model_path, config, process_group)
        self.model_path, self.tokenizer_folder, self.tokenizer = loaded.source, loaded.folder, loaded.tokenizer
        self.model, self.window, self.parallel = loaded.decoder, loaded.window, loaded.decoder.parallel
        self.runner, self.graph_bytes = loaded.runner(config)
        pool = PagePool(self.runner.num_pages, config.page_size)
        self.scheduler = Scheduler(
            pool,
            max_step_tokens=config.max_step_tokens,
            max_sequences=config.max_sequences,
            window=self.window,
            eos_ids=self.tokenizer.eos_ids,
        )
        self.longest = min(self.window, pool.num_pages * pool.page_size)
        self.drafts = config.drafts and self.model.ops.exact
        self.step_cost = StepCost.of_weights(config.weight_bits)
        self.weights_version = 0
        self._outbox = Outbox(self.scheduler.finish)
        self._to_end: deque[tuple[Sequence, bool]] = deque()
        self._stepping = self._updating = False
        self._next_id = 0

    @property
    def unfinished(self) -> bool:
        """Whether a sequence is not finished, or an update was not handed out yet."""
        return self.scheduler.unfinished or bool(self._outbox.updates)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything; without work only open sequences are left, which wait for input."""
        return self.scheduler.has_work or bool(self._outbox.updates)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sample: int = 0,
        turn: int = 0,
        is_open: bool = False,
        drafter: Drafter | None = None,
        keep_kv: bool = False,
        carried: Carried | None = None,
    ) -> Sequence:
        """Queue a prompt: text (special tokens recognised), token ids, or segments. Its updates come from `step`.

        sample, turn: with params.seed they choose the random stream. is_open: the prompt may grow by `extend` until
        `close`. drafter: proposes what the response may be; by default one that reads the prompt. keep_kv: its pages
        stay when it has finished, until another prompt carries its KV on, it is aborted, or the pages are needed.
        carried: such KV for a part of this prompt, approximate; what was lost meanwhile is computed. Raises
        RequestError if it can never be served, WindowError if it is too long for that, ConfigError for carried KV where
        KV has 8 bits.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {params!r}")
        check_params(params, self.model.config.vocab_size)
        for name, number in (("sample", sample), ("turn", turn)):
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**63:
                raise RequestError(f"{name} must be a whole number of at least 0, got {number!r}")
        for name, flag in (("is_open", is_open), ("keep_kv", keep_kv)):
            if not isinstance(flag, bool):
                raise RequestError(f"{name} must be True or False, got {flag!r}")
        self._require_weights("add a request")
        self._require_drafts(drafter)
        ids = prompt_ids(prompt, self.tokenizer, self.model.config.vocab_size)
        if carried is not None:
            self.require_carriable()
        if self.drafts and drafter is None and not is_open:
            drafter = self._drafter(segments_of(prompt) or ids)
        sequence = Sequence(self._next_id, ids, params, sample, turn, is_open, drafter, keep_kv, carried)
        text = TextStream(self.tokenizer.decode, params.stop, params.min_tokens)
        self.scheduler.add(sequence)  # last of what can fail: it must not run without the rest
        self._note("add", ids.tobytes(), params, sample, turn, is_open, keep_kv)
        self._outbox.texts[sequence] = text
        self._next_id += 1
        return sequence

    def extend(self, sequence: Sequence, ids: Iterable[int]) -> None:
        """Append token ids to an open sequence's prompt. Raises RequestError if it is not open or would not fit."""
        self._require_own(sequence)
        new = prompt_ids(ids, self.tokenizer, self.model.config.vocab_size)
        self.scheduler.extend(sequence, new)
        self._note("extend", sequence.id, new.tobytes())

    def close(self, sequence: Sequence, *, drafter: Drafter | None = None) -> None:
        """End an open sequence's prompt; its response is drawn from the next step on.

        drafter: as in `add`, for one that had to see the whole prompt; it takes the place of one given there.
        """
        self._require_own(sequence)
        self._require_drafts(drafter)
        self.scheduler.close(sequence)
        self._note("close", sequence.id)
        if drafter is not None:
            sequence.drafter = drafter
        elif self.drafts and sequence.drafter is None:
            sequence.drafter = self._drafter(sequence.tokens)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence in any state; `step` reports it with finish_reason "abort".

        A finished one stays as it is, but lets go of KV that it keeps.
        """
        self._require_own(sequence)
        self._end(sequence, reported=True)

    def abort_all(self) -> None:
        """End every sequence, as `abort` does."""
        for sequence in list(self._outbox.texts):
            self.abort(sequence)

    def step(self) -> list[Update]:
        """Run one forward pass over whatever is due; -> one update per sequence that got a token or ended.

        If it fails anywhere (out of memory, Ctrl-C) nothing is lost: what it left undone is computed again.
        """
        self._require_weights("run a step")
        self._end_noted()
        self._stepping = True
        try:
            step = self.scheduler.schedule()
            with nullcontext() if self.parallel is None else self.parallel.step(step):
                results = self.runner.run(step, partial(self.scheduler.settle, step))
            self.scheduler.commit(step, results)
            for span, result in zip(step.spans, results, strict=True):
                if span.samples or result.error is not None:
                    self._outbox.tell(span.sequence)
        except BaseException:
            self.scheduler.recover(self._outbox.texts)
            self._outbox.tell_rest()
            raise
        finally:
            self._stepping = False
        return self._outbox.take()

    def generate(
        self, prompts: Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete a list of prompts (str or token ids); -> their completions in the same order.

        params: one for all, or one per prompt. Prompt i draws from the random stream of sample i.
        Raises RequestError for a prompt that cannot be served, and when one ends in an error.
        """
        added: list[Sequence] = []
        with self.aborting(added):
            for i, (prompt, chosen) in enumerate(pair_with_params(prompts, params)):
                added.append(self.add(prompt, chosen, sample=i))
            done: dict[Sequence, Completion] = {}
            while len(done) < len(added):
                for update in self.step_for(added):
                    if update.completion is not None:
                        done[update.sequence] = update.completion
                require_delivery([sequence for sequence in added if sequence.finished and sequence not in done])
        return [without_error(done[sequence], f"prompt {i}") for i, sequence in enumerate(added)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, sample: int = 0) -> Stream:
        """Complete one prompt; an update per token, the last one with the completion. Closing the stream aborts."""
        return Stream(self, self.add(prompt, params, sample=sample))

    @contextmanager
    def update(self) -> Iterator[None]:
        """The only way to change the model's parameters in place: raises the weights version and forgets all resident
        KV.

        Raises RequestError while sequences are unfinished, as their KV would belong to the old weights, and for an
        engine with quantised weights.
        """
        if self.config.weights != "native":
            raise RequestError(
                f"this engine's weights are quantised (weights={self.config.weights!r}) and cannot be changed; "
                "make the engine with weights='native' to train"
            )
        with self.exchange():
            yield

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """As `update`, for an engine with quantised weights too, whose weights others take the place of."""
        self._require_weights("begin another update")
        if self.scheduler.unfinished:
            live = len(self.scheduler.running) + len(self.scheduler.waiting)
            raise RequestError(f"{live} sequences are unfinished; finish or abort them before the weights change")
        self._updating = True
        try:
            yield
        finally:
            self._updating = False
            self.weights_version += 1
            self.scheduler.let_go_all()
            self.scheduler.pool.forget()
            self.runner.refresh()

    def save(self, folder: str | Path) -> None:
        """Write the weights and the tokenizer as a Hugging Face folder. All ranks of a process group call it together;
        one of them writes.

        Raises CheckpointError when the folder exists and is not empty, when it cannot be written, and for a model with
        adapters or quantised weights.
        """
        parameters = whole_parameters(self.model)
        if self.parallel is None or self.parallel.rank == 0:
            checkpoint.save(folder, self.model.whole_config, parameters, self.tokenizer_folder)
        if self.parallel is not None:
            self.parallel.lead(None)  # it is there for all of them

    def describe(self) -> dict[str, Any]:
        """What decides an answer besides the prompt: for traces. Plain JSON values.

        All ranks of a process group call it together.
        """
        return {
            "model": str(self.model_path),
            "weights": self.model.fingerprint(),
            "tokenizer": self.tokenizer.fingerprint(),
            "dtype": self.config.dtype,
            "weights_kind": self.config.weights,
            "kv_dtype": self.config.kv_dtype,
            "backend": self.model.ops.backend,
            "window": self.window,
            "rope_scaling": None if self.config.rope_scaling is None else dict(self.config.rope_scaling),
            "weights_version": self.weights_version,
        }

    def step_for(self, own: Collection[Sequence]) -> list[Update]:
        """One step for a driver that knows only its own sequences; other updates wait for whoever asks next."""
        mine: list[Update] = []
        for update in self.step():
            (mine if update.sequence in own else self._outbox.updates).append(update)
        return mine

    @contextmanager
    def aborting(self, sequences: Collection[Sequence]) -> Iterator[None]:
        """A driver's frame: on leaving it early its sequences end, and updates that nobody would read are dropped."""
        try:
            yield
        finally:
            for sequence in list(sequences):
                self._end(sequence, reported=False)

    def require_carriable(self) -> None:
        """Raises ConfigError where KV can't be moved to other positions."""
        if self.config.kv_dtype in ("int8", "fp8"):
            raise ConfigError(
                f"KV in {self.config.kv_dtype} can't be carried to other positions: its keys would be rounded twice; "
                "use kv_dtype='float32' or 'bfloat16', or memory_kv='exact'"
            )

    def _end(self, sequence: Sequence, reported: bool) -> None:
        """Abort between two steps: now, or before the next one. reported: whether anybody will read of it.

        A forgotten stream may be collected, and so end its sequence, at any moment: in the middle of a step too.
        """
        self._to_end.append((sequence, reported))
        if not self._stepping:
            self._end_noted()

    def _end_noted(self) -> None:
        self._stepping = True
        while self._to_end:
            sequence, reported = self._to_end.popleft()
            if sequence.finished:
                self.scheduler.let_go(sequence)
            else:
                self._note("abort", sequence.id)
                self.scheduler.finish(sequence, "abort")
                self._outbox.tell(sequence)
            if not reported:
                self._outbox.forget(sequence)
        self._stepping = False

    def _note(self, call: str, *values: object) -> None:
        if self.parallel is not None:
            self.parallel.note(call, *values)

    def _require_weights(self, what: str) -> None:
        if self._updating:
            raise RequestError(f"the weights are being updated; {what} after the update's `with` block")

    def _drafter(self, prompt: Iterable[int] | Iterable[Segment]) -> Drafter:
        return Drafter.for_prompt(prompt, acceptance=Acceptance(self.step_cost))

    def _require_drafts(self, drafter: Drafter | None) -> None:
        if drafter is None or self.drafts:
            return
        if not self.config.drafts:
            raise RequestError("a drafter was given but EngineConfig.drafts is False; leave one of them out")
        raise RequestError(
            f"a drafter was given but the backend is {self.model.ops.backend!r}, where results depend on how many rows "
            "are computed at once, so that drafts would change them; use backend='cpu' (on a GPU exact=True), or leave "
            "the drafter out"
        )

    def _require_own(self, sequence: Sequence) -> None:
        if not sequence.finished and sequence not in self._outbox.texts:
            raise RequestError(f"sequence {sequence.id} belongs to another engine")
