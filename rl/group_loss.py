"""GroupLoss: the loss of one group's turns through the model, and its gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine import lora
from ..engine.engine import Engine
from ..engine.model import Decoder
from ..engine.reading import Turn
from .advantage import advantages
from .config import AlgorithmConfig
from .fused_loss import Head, fused_policy_loss, token_logprobs
from .loss import TokenRows, token_weights
from .packing import Pack, pack_turns, response_rows
from .statistics import LossStatistics
from .trainer_config import TrainerConfig
from .trajectory import Group

__all__ = ["GroupLoss", "OldLogprobs"]

OldLogprobs = dict[int, Tensor]  # of the tokens of each turn, by id(turn)


class GroupLoss:
    """Adds the gradient of one group after the other to the parameters, as sums that nothing has divided yet.

    recomputed: log-probabilities of the policy that were computed besides those of the loss itself.
    """

    def __init__(self, engine: Engine, config: TrainerConfig) -> None:
        """Copies the model when the reference is a copy. The adapters, if any, must be on it."""
        self._engine, self._config = engine, config
        self._kv_dtype = engine.runner.pages[0].key.dtype
        self._reference = config.reference_kind(bool(lora.adapters(engine.model)))
        self._original = _frozen_copy(engine.model) if self._reference == "copy" else engine.model
        self.recomputed = 0

    def backward(self, group: Group, old: OldLogprobs | None) -> tuple[float, LossStatistics]:
        """Run forward, loss and backward of a group; -> its part of the denominator, and what was seen.

        old: log-probabilities of the old policy, with an importance correction; None is the policy as it is now.
        Without a correction the rollout's own are the old ones. A group that cannot pull the policy, as its rewards are
        equal and there is neither KL nor entropy in the loss, costs nothing.
        """
        algorithm, model = self._config.algorithm, self._engine.model
        turns, denominator = _token_turns(group, algorithm)
        statistics = LossStatistics.nothing()
        if not algorithm.kl and not algorithm.entropy and not any(turn.advantage for turn in turns):
            return denominator, statistics
        with self._together(turns):
            for pack in self._packs([turn.turn for turn in turns]):
                rows = self._rows(pack, [turns[i] for i in pack.turns], old, group)
                hidden = self._hidden(model, pack, self._config.recompute)
                result = fused_policy_loss(hidden, pack.targets, _head(model, group), rows, algorithm)
                result.loss.backward()  # type: ignore[no-untyped-call]
                statistics += result.statistics
        return denominator, statistics

    @torch.no_grad()
    def old_logprobs(self, group: Group) -> OldLogprobs:
        """By the model as it is now."""
        token_turns = _token_turns(group, self._config.algorithm)[0]
        turns = [turn.turn for turn in token_turns]
        found: OldLogprobs = {}
        with self._together(token_turns):
            for pack in self._packs(turns):
                logprobs = self._logprobs(self._engine.model, pack, group)
                self.recomputed += len(logprobs)
                for i, part in zip(pack.turns, torch.split(logprobs, pack.lengths), strict=True):
                    found[id(turns[i])] = part
        return found

    def _together(self, turns: list[_TokenTurn]) -> contextlib.AbstractContextManager[None]:
        """The block in which ranks that hold parts of the model run the same turns."""
        parallel = self._engine.parallel
        if parallel is None:
            return contextlib.nullcontext()
        carried = repr([(turn.advantage, turn.weight, turn.turn.logprobs) for turn in turns]).encode()
        ids = [turn.turn.prompt_ids.tobytes() + turn.turn.response_ids.tobytes() for turn in turns]
        return parallel.together("training pass", b"|".join([carried, *ids]))

    def _packs(self, turns: list[Turn]) -> Iterator[Pack]:
        config = self._config
        ids = [(turn.prompt_ids, turn.response_ids) for turn in turns]
        packs = pack_turns(ids, config.train_tokens, self._engine.config.page_size, config.share_prefixes)
        return (pack.to(self._engine.model.ops.device) for pack in packs)

    def _hidden(self, model: Decoder, pack: Pack, recompute: bool) -> Tensor:
        return response_rows(model, pack, self._engine.config.page_size, self._kv_dtype, recompute)

    @torch.no_grad()
    def _logprobs(self, model: Decoder, pack: Pack, group: Group) -> Tensor:
        return token_logprobs(self._hidden(model, pack, False), pack.targets, _head(model, group))[0]

    def _rows(self, pack: Pack, turns: list[_TokenTurn], old: OldLogprobs | None, group: Group) -> TokenRows:
        """What the tokens of a pack carry. turns: those of the pack, in its order."""
        model = self._engine.model
        device = model.ops.device
        lengths = torch.tensor(pack.lengths, device=device)

        def floats(values: Iterable[float]) -> Tensor:
            return torch.tensor([*values], dtype=model.activation_dtype, device=device)

        drawn = floats(logprob for turn in turns for logprob in turn.turn.logprobs)
        corrected = self._config.algorithm.correction != "none"
        before = None if old is None else torch.cat([old[id(turn.turn)] for turn in turns])
        return TokenRows(
            advantages=floats(turn.advantage for turn in turns).repeat_interleave(lengths),
            weights=floats(turn.weight for turn in turns).repeat_interleave(lengths),
            turns=torch.arange(len(turns), device=device).repeat_interleave(lengths),
            old_logprobs=before if corrected else drawn,
            rollout_logprobs=drawn if corrected else None,
            reference_logprobs=self._reference_logprobs(pack, group),
        )

    def _reference_logprobs(self, pack: Pack, group: Group) -> Tensor | None:
        if self._reference == "none":
            return None
        off = lora.disabled(self._original) if self._reference == "lora_off" else contextlib.nullcontext()
        with off:
            return self._logprobs(self._original, pack, group)


@dataclass(frozen=True)
class _TokenTurn:
    """A turn that is trained on, with what each of its tokens carries."""

    turn: Turn
    advantage: float
    weight: float


def _token_turns(group: Group, algorithm: AlgorithmConfig) -> tuple[list[_TokenTurn], float]:
    """The turns of a group that are trained on, and its part of the denominator."""
    values = advantages([trajectory.reward for trajectory in group.trajectories], algorithm)
    turns = [(turn, i) for i, trajectory in enumerate(group.trajectories) for turn in trajectory.turns]
    masked = [algorithm.mask_truncated and turn.finish_reason == "length" for turn, _ in turns]
    tokens = [0 if mask else len(turn.response_ids) for (turn, _), mask in zip(turns, masked, strict=True)]
    weights, denominator = token_weights(tokens, [i for _, i in turns], algorithm)
    trained = zip(turns, tokens, weights, strict=True)
    return [_TokenTurn(turn, values[i], weight) for (turn, i), count, weight in trained if count], denominator


def _head(model: Decoder, group: Group) -> Head:
    return Head(model.head_weight, group.sampling.temperature, model.ops)


def _frozen_copy(model: Decoder) -> Decoder:
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    copy = Decoder.from_parameters(model.config, model.ops, parameters, len(model.cos)).requires_grad_(False)
    if model.parallel is not None:
        model.parallel.apply(copy)
    return copy
