"""Ours: the engine of this package, doing whole steps as a program that uses it would."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..engine.config import EngineConfig, SamplingParams
from ..engine.engine import Engine
from ..engine.model import Linear
from ..engine.model_config import ModelConfig
from .clock import Sample, timed
from .device import synchronize

__all__ = ["EXACT", "VARIANTS", "Ours", "Variant", "tokens"]


@dataclass(frozen=True)
class Variant:
    """A way to hold weights and KV. dtype: as in WEIGHT_BITS. weights, exact: of EngineConfig."""

    dtype: str
    kv_dtype: str
    weights: str = "native"
    exact: bool = False

    @property
    def engine(self) -> str:
        return f"palimpsest, kv {self.kv_dtype}{', exact' if self.exact else ''}"


VARIANTS = {
    "float32": Variant("float32", "float32"),
    "bfloat16": Variant("bfloat16", "bfloat16"),
    "int8": Variant("int8", "bfloat16", "int8"),
    "int4": Variant("int4", "bfloat16", "int4"),
}
EXACT = Variant("bfloat16", "bfloat16", exact=True)  # on a GPU, where it costs something


class Ours:
    """One engine of one variant, with room for `sequences` sequences of `longest` tokens."""

    def __init__(
        self, model: str, variant: Variant, *, sequences: int, longest: int, threads: int, drafts: bool = False,
        backend: str = "auto",
    ) -> None:  # fmt: skip
        """drafts: whether responses are drafted; where engines are compared token by token they are not.
        backend: EngineConfig.backend.

        Raises CheckpointError or ConfigError when the model or the variant cannot be run."""
        config = EngineConfig(
            dtype=variant.dtype if variant.weights == "native" else "float32",
            weights=variant.weights,
            kv_dtype=variant.kv_dtype,
            kv_share=0.9,  # of what is free: the windows below bound the pool
            max_context=longest,
            max_sequences=sequences,
            threads=threads,
            drafts=drafts,
            backend=backend,
            exact=variant.exact,
        )
        self.variant = variant
        self.engine = Engine(model, config)
        if self.engine.graph_bytes:
            print(f"{variant.engine}: {self.engine.graph_bytes / 2**20:,.0f} MiB in CUDA graphs", file=sys.stderr)

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.model.config

    def prefill(self, length: int, seed: int) -> Sample:
        """A prompt that no cache knows, to the first token of its response."""
        return timed(self.prefilling(length, seed))

    def prefilling(self, length: int, seed: int) -> Callable[[], object]:
        """What `prefill` times."""
        prompt = tokens(length, seed, self.model_config.vocab_size)
        return lambda: self.engine.generate([prompt], _greedy(1))

    def decode(self, batch: int, context: int, steps: int) -> Sample:
        """`steps` steps, each a token for each of `batch` sequences behind prompts of their own of `context` tokens."""
        with self.decoding(batch, context, steps) as run:
            return timed(run)

    @contextmanager
    def decoding(self, batch: int, context: int, steps: int) -> Iterator[Callable[[], None]]:
        """Everything before the first step of `decode`; -> a function that takes the steps.

        The prompts stay resident, so only the first call has to compute them.
        """
        prompts = [tokens(context, 100 + i, self.model_config.vocab_size) for i in range(batch)]
        for prompt in prompts:
            self.engine.generate([prompt], _greedy(1))
        sequences = [self.engine.add(prompt, _greedy(steps + 1)) for prompt in prompts]
        with self.engine.aborting(sequences):
            while not all(sequence.response_length for sequence in sequences):
                self.engine.step()

            def run() -> None:
                for _ in range(steps):
                    self.engine.step()

            yield run

    def linear(self, rows: int, seed: int) -> Sample:
        """The linear layers alone, all but the head, over `rows` rows in the pieces that a prefill makes."""
        generator = torch.Generator().manual_seed(seed)
        layers = [module for module in self.engine.model.model.modules() if isinstance(module, Linear)]
        sizes = {layer.weight.shape[1] for layer in layers}
        device = self.engine.runner.device
        inputs = {size: torch.randn(rows, size, generator=generator).to(device) for size in sizes}
        pieces = range(0, rows, self.engine.config.max_step_tokens)

        @torch.inference_mode()
        def run() -> None:
            for start in pieces:
                for layer in layers:
                    layer(inputs[layer.weight.shape[1]][start : start + self.engine.config.max_step_tokens])
            synchronize(device)

        return timed(run)


def tokens(count: int, seed: int, vocabulary: int) -> list[int]:
    """Pseudo-random token ids (a 32-bit linear congruential generator), the ones that the peers' workers make."""
    state = (seed * 2654435761 + 12345) & 0xFFFFFFFF
    span = min(vocabulary, 49000) - 200
    ids = []
    for _ in range(count):
        state = (1664525 * state + 1013904223) & 0xFFFFFFFF
        ids.append(100 + (state >> 8) % span)
    return ids


def _greedy(length: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
