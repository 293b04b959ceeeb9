"""What quantised weights and KV cost in quality: `python -m palimpsest.bench.quality`.

Every kind of weights reads the same text. Perplexity: of each token after those before it. Agreement: how often the
likeliest next token is that of float32 weights and KV, with the same tokens before it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..engine import checkpoint, kv_rows
from ..engine.checkpoint import Checkpoint
from ..engine.config import WEIGHTS
from ..engine.defaults import embedded_model_path
from ..engine.errors import ConfigError, PalimpsestError
from ..engine.model import Batch, Decoder, KVPages, Linear
from ..engine.ops import Spans, select
from ..engine.quant import QuantisedLinear, ScaledLinear, quantise, replace_weights
from ..engine.tokenizer import Tokenizer

__all__ = ["main", "run"]

TEXT = Path(__file__).resolve().parents[1] / "examples" / "demo" / "harbour.txt"
KINDS = ("float32", "bfloat16", *(kind for kind in WEIGHTS if kind not in ("native", "int4-g32")))  # that is int4
QUICK = ("float32", "int8", "int4")
# Perplexity of float32 over that of the kind.
LEAST_RATIO = {"int8": 0.99, "int4": 0.80}
ROWS = 64  # of logits at once
EXIT_MISSED, EXIT_ERROR = 1, 2


@dataclass(frozen=True)
class Scores:
    """Over one text: the mean negative log-likelihood of its tokens (nats), and the likeliest token at each place."""

    loss: float
    likeliest: Tensor

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def main(argv: Sequence[str] | None = None) -> int:
    """-> exit code: 0, 1 when --check finds a missed target, 2 after a mistake of the user."""
    args = _parser().parse_args(argv)
    try:
        report = run(args.model, args.text, args.tokens, QUICK if args.quick else KINDS, args.kv_dtype)
    except PalimpsestError as error:
        print(f"palimpsest bench quality: {error}", file=sys.stderr)
        return EXIT_ERROR
    print(_table(report["rows"]))
    print(json.dumps(report), flush=True)
    return EXIT_MISSED if args.check and any(target["met"] is False for target in report["targets"]) else 0


def run(model: str | None, text: Path, tokens: int, kinds: Sequence[str], kv_dtype: str = "float32") -> dict[str, Any]:
    """The JSON document of the report. kv_dtype: of the KV that each of `kinds` is read with.

    Raises PalimpsestError for a model or text that cannot be used.
    """
    loaded = checkpoint.load(embedded_model_path() if model is None else model, torch.float32)
    ids = _ids(text, Tokenizer.load(loaded.folder), min(tokens, loaded.config.max_position))
    exact = _score(_model(loaded, "float32", len(ids)), ids, torch.float32)
    rows = []
    for kind in kinds:
        if kind == "file" and not loaded.source.is_file():
            continue
        decoder = _model(loaded, kind, len(ids), kv_dtype)
        scores = _score(decoder, ids, kv_rows.element_type(kv_dtype))
        rows.append(
            {
                "engine": "palimpsest",
                "work": "quality",
                "dtype": kind,
                "kv_dtype": kv_dtype,
                "context": len(ids),
                "weight_bytes": _weight_bytes(decoder),
                "perplexity": round(scores.perplexity, 4),
                "agreement": round((scores.likeliest == exact.likeliest).double().mean().item(), 4),
            }
        )
    machine = {"isa": _isa(), "torch": torch.__version__, "model": loaded.source.name}
    return {"bench": "quality", "machine": machine, "rows": rows, "targets": _targets(rows, exact.perplexity)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="palimpsest bench quality",
        description="Measure what quantised weights cost in quality; the last line is JSON.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="PATH", help="Hugging Face folder or GGUF file (the embedded SmolLM2-135M)")
    add("--text", metavar="FILE", type=Path, default=TEXT, help="a text file (that of the demo)")
    add("--tokens", type=int, metavar="N", default=512, help="of the text are read (%(default)s)")
    add(
        "--kv-dtype",
        choices=("float32", "bfloat16", "int8", "fp8"),
        default="float32",
        help="of keys and values (%(default)s)",
    )
    add("--check", action="store_true", help="exit with 1 when a target is missed")
    add("--quick", action="store_true", help=f"{', '.join(QUICK)} only")
    return parser


def _ids(text: Path, tokenizer: Tokenizer, count: int) -> list[int]:
    if count < 2:
        raise ConfigError(f"--tokens must be at least 2, got {count}: the first token is not predicted")
    try:
        ids = tokenizer.encode(text.read_text(encoding="utf-8"))[:count]
    except OSError as error:
        raise ConfigError(f"the text cannot be read ({error}); name another one with --text") from error
    if len(ids) < count:
        raise ConfigError(f"{text} has only {len(ids)} tokens; ask for fewer with --tokens")
    return list(ids)


def _model(loaded: Checkpoint, kind: str, window: int, kv_dtype: str = "float32") -> Decoder:
    """A model of its own that shares the checkpoint's tensors where it can. In fp8 it is run by plain torch."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    parameters = {name: tensor.to(dtype) for name, tensor in loaded.parameters.items()}
    config = loaded.config
    backend = "reference" if "fp8" in (kind, kv_dtype) else "auto"
    ops = select(backend, dtype, torch.float32, config.head_dim, config.num_heads // config.num_kv_heads)
    model = Decoder.from_parameters(config, ops, parameters, window)
    model.requires_grad_(False)
    if kind == "file":
        replace_weights(model, checkpoint.load(loaded.source, dtype, "file").packed)
    elif kind not in ("float32", "bfloat16"):
        quantise(model, kind)
    return model


@torch.inference_mode()
def _score(model: Decoder, ids: list[int], kv_dtype: torch.dtype) -> Scores:
    """Read the whole text in one step, into a single page."""
    count, config = len(ids), model.config
    page = torch.empty(1, config.num_kv_heads, count, kv_rows.columns(config.head_dim, kv_dtype), dtype=kv_dtype)
    pages = [KVPages(torch.empty_like(page), torch.empty_like(page)) for _ in range(config.num_layers)]
    positions, tokens = torch.arange(count), torch.tensor(ids)
    spans = Spans(*(torch.tensor(value, dtype=torch.int32) for value in ([0, count], [count], [[0]])))
    hidden = model(Batch(tokens, positions, positions, spans), pages)
    loss, likeliest = 0.0, []
    for start in range(0, count, ROWS):
        logits = model.logits(hidden[start : start + ROWS])
        likeliest.append(logits.argmax(dim=1))
        targets = tokens[start + 1 : start + ROWS + 1]
        loss += nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="sum").item()
    return Scores(loss / (count - 1), torch.cat(likeliest))


def _weight_bytes(model: Decoder) -> int:
    """Bytes of the linear layers and the head: what a decode step reads."""
    modules = list(model.modules())
    packed = sum(module.weight.nbytes for module in modules if isinstance(module, QuantisedLinear))
    packed += sum(module.codes.nbytes + module.scales.nbytes for module in modules if isinstance(module, ScaledLinear))
    plain = sum(module.weight.nbytes for module in modules if isinstance(module, Linear))
    return packed + plain + (model.model.embed_tokens.weight.nbytes if model.lm_head is None else 0)


def _isa() -> str:
    try:
        from .. import _C
    except ImportError:
        return "reference"
    return _C.CpuKernels("best").isa


def _targets(rows: Sequence[dict[str, Any]], exact: float) -> list[dict[str, Any]]:
    targets = []
    for row in rows:
        if row["dtype"] in LEAST_RATIO:
            name = f"quality.{row['context']}.{row['dtype']}.perplexity_ratio"
            value, least = exact / row["perplexity"], LEAST_RATIO[row["dtype"]]
            targets.append({"name": name, "value": round(value, 4), "target": least, "met": value >= least})
    return targets


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'weights':<12}{'MB':>8}{'perplexity':>12}{'agreement':>11}"]
    for row in rows:
        lines.append(
            f"{row['dtype']:<12}{row['weight_bytes'] / 1e6:>8.1f}{row['perplexity']:>12.3f}{row['agreement']:>11.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
