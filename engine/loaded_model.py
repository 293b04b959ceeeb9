"""LoadedModel: a checkpoint made ready to run as an engine's configuration says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from . import checkpoint, kv_rows
from .config import EngineConfig
from .errors import ConfigError
from .graphs import GpuRecorder, GraphPlan
from .memory import bytes_held, explained, pool_pages
from .model import Decoder
from .model_config import ModelConfig
from .ops import require_kinds, select
from .quant import replace_weights
from .runner import Runner, page_bytes
from .tokenizer import Tokenizer

__all__ = ["LoadedModel"]


@dataclass(frozen=True)
class LoadedModel:
    """source: the path as it was given. folder: of the tokenizer's files. window: most tokens of prompt and response.

    decoder: on its device, without gradients; this rank's part of the model where it was split.
    """

    source: Path
    folder: Path
    tokenizer: Tokenizer
    decoder: Decoder
    window: int

    @classmethod
    def load(cls, path: str | Path, config: EngineConfig, group: dist.ProcessGroup | None = None) -> LoadedModel:
        """Load a Hugging Face folder or a GGUF file, quantised as `config.weights` says and split over a group's ranks.

        Raises CheckpointError for files that cannot be run, ConfigError for a configuration that this model, machine or
        group cannot meet.
        """
        require_kinds(config.backend, config.weights, config.kv_dtype)
        if group is not None and dist.get_world_size(group) == 1:
            group = None
        if group is not None and config.weights != "native":
            raise ConfigError(
                f"weights={config.weights!r} cannot be split over {dist.get_world_size(group)} ranks; use "
                "weights='native', or one rank"
            )
        dtype = getattr(torch, config.dtype)
        loaded = checkpoint.load(path, dtype, config.weights, group)
        model = loaded.config if config.rope_scaling is None else loaded.config.with_rope_scaling(config.rope_scaling)
        tokenizer = Tokenizer.load(loaded.folder)
        tokenizer.check_ids(model.vocab_size)
        window = _window(config, model)
        parallel = loaded.parallel
        if parallel is not None:
            parallel.agree("configuration", repr((config, model)).encode())
            parallel.shards = replace(parallel.shards, config=model)
            model = parallel.shards.local
        heads = model.num_heads // model.num_kv_heads
        ops = select(
            config.backend, dtype, _kv_dtype(config), model.head_dim, heads, config.attention, exact=config.exact
        )  # fmt: skip
        decoder = Decoder.from_parameters(model, ops, loaded.parameters, window, loaded.packed)
        decoder.requires_grad_(False)
        replace_weights(decoder, loaded.packed)
        with explained("the model", ops.device, "use dtype='bfloat16', or split it over ranks (process_group)"):
            decoder.to(ops.device)
        if parallel is not None:
            parallel.apply(decoder)
        return cls(loaded.source, loaded.folder, tokenizer, decoder, window)

    def runner(self, config: EngineConfig) -> tuple[Runner, int]:
        """A runner with as many pages as the configuration and the memory allow; -> also the bytes of its graphs.

        Raises ConfigError when there is no memory for it.
        """
        model, device, kv_dtype = self.decoder, self.decoder.ops.device, _kv_dtype(config)
        graphs = _graph_plan(config, model, self.window)
        make = partial(
            Runner,
            model,
            page_size=config.page_size,
            kv_dtype=kv_dtype,
            eos_ids=self.tokenizer.eos_ids,
            graphs=graphs,
        )
        # What graphs take is known when they were recorded, over one page here, and the pool gets a share of the rest.
        graph_bytes = 0 if graphs is None else bytes_held(partial(make, num_pages=1), device)
        page = page_bytes(model.config, config.page_size, kv_dtype)
        num_pages = pool_pages(config, page, self.window, device, graph_bytes)
        if model.parallel is not None:
            num_pages = model.parallel.least(num_pages)
        return make(num_pages=num_pages), graph_bytes


def _kv_dtype(config: EngineConfig) -> torch.dtype:
    """Element type of the pages: by default that of the activations."""
    if config.kv_dtype is not None:
        return kv_rows.element_type(config.kv_dtype)
    return torch.float64 if config.dtype == "float64" else torch.float32


def _graph_plan(config: EngineConfig, model: Decoder, window: int) -> GraphPlan | None:
    """The graphs of an engine; None where there are none."""
    # What several ranks do in a step, FlashInfer, and plain torch's attention cannot be recorded.
    alone = model.parallel is None and config.attention not in ("flashinfer", "reference")
    if not config.graphs or model.ops.device.type != "cuda" or not alone:
        return None
    return GraphPlan.within(GpuRecorder, config.max_step_tokens, config.max_sequences, window)


def _window(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of prompt + response. Raises ConfigError for a window beyond what the model's positions were made for."""
    if config.max_context is None:
        return model.max_position
    if config.max_context > model.max_position:
        raise ConfigError(
            f"max_context={config.max_context} exceeds the model's window of {model.max_position}; lower it, or pass "
            'rope_scaling={"rope_type": "yarn", "factor": ...} if the model was made for that'
        )
    return config.max_context
