"""Training runs the kernels of inference: the same bits forward, and gradients as exact as plain torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from palimpsest.engine import checkpoint, cpu, cpu_backward, kv_rows, reference
from palimpsest.engine.autograd import Differentiable
from palimpsest.engine.model import Batch, Decoder, KVPages
from palimpsest.engine.ops import Ops, Spans, Turn, select
from palimpsest.engine.quant import quantise_weight
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch, assert_same_bits
from palimpsest.tests.tiny_models import make_model_folder
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(not cpu.BUILT, reason="the extension is not built"),
    pytest.mark.usefixtures("fixed_numbers_and_threads"),
]

KERNELS = Differentiable(cpu, cpu_backward)
PAGE_SIZE = 8
SHARED = 16  # tokens of a prefix that is computed once, whole pages
MODELS = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                  "original_max_position_embeddings": 128}},
    "qwen3": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3 untied": {},
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), request.param.split()[0], **MODELS[request.param])


def load(folder: Path, backend: str, dtype: torch.dtype) -> Decoder:
    loaded = checkpoint.load(folder, dtype)
    config = loaded.config
    ops = select(backend, dtype, dtype, config.head_dim, config.num_heads // config.num_kv_heads)
    return Decoder.from_parameters(config, ops, loaded.parameters, 512)


def make_batch(lengths: Sequence[int]) -> Batch:
    """A span of SHARED tokens, and spans of `lengths` tokens that go on from it; then one that shares nothing."""
    spans = [(0, SHARED), *((SHARED, SHARED + n) for n in lengths), (0, 21)]
    needed = [-(-end // PAGE_SIZE) for _, end in spans]
    table = torch.zeros(len(spans), max(needed), dtype=torch.int32)
    free = torch.randperm(pages_needed(lengths)).int().tolist()
    shared = free[: SHARED // PAGE_SIZE]
    del free[: len(shared)]
    positions, slots = [], []
    for row, (start, end), count in zip(table, spans, needed, strict=True):
        own = shared if end == SHARED else [*(shared if start else []), *free[: count - (start // PAGE_SIZE)]]
        if end != SHARED:
            del free[: count - (start // PAGE_SIZE)]
        row[:count] = torch.tensor(own)
        positions += range(start, end)
        slots += [own[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(start, end)]
    starts = torch.tensor([0, *(end - start for start, end in spans)]).cumsum(0).int()
    ends = torch.tensor([end for _, end in spans], dtype=torch.int32)
    ids = torch.randint(0, 300, (len(positions),))
    ids[::5] = 7  # one id many times
    return Batch(ids, torch.tensor(positions), torch.tensor(slots), Spans(starts, ends, table))


def pages_needed(lengths: Sequence[int]) -> int:
    return 10 + sum(-(-(SHARED + n) // PAGE_SIZE) for n in lengths)


def make_pages(model: Decoder, lengths: Sequence[int], dtype: torch.dtype) -> list[KVPages]:
    config = model.config
    shape = (pages_needed(lengths), config.num_kv_heads, PAGE_SIZE, config.head_dim)
    return [KVPages(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))) for _ in range(config.num_layers)]


LENGTHS = [5, 40, 1, 70]


def logits_of(model: Decoder, batch: Batch) -> Tensor:
    return model.logits(model(batch, make_pages(model, LENGTHS, model.activation_dtype)))


def gradients(model: Decoder, batch: Batch, targets: Tensor) -> dict[str, Tensor]:
    """Those of the mean negative log-likelihood of `targets`, by parameter."""
    model.zero_grad()
    logits = logits_of(model, batch)
    chosen = logits.gather(1, targets[:, None])[:, 0]
    (model.ops.log_sum_exp(logits) - chosen).mean().backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_all_parameters_get_exact_gradients(folder: Path) -> None:
    batch = make_batch(LENGTHS)
    targets = torch.randint(0, 300, (len(batch.ids),))
    models = [
        load(folder, backend, dtype)
        for backend, dtype in (("cpu", torch.float32), ("reference", torch.float32), ("reference", torch.float64))
    ]
    ours, plain, exact = (gradients(model, batch, targets) for model in models)
    assert ours.keys() == exact.keys() == dict(models[0].named_parameters()).keys()
    for name in exact:
        assert exact[name].abs().max() > 0, name
        assert_as_exact_as_torch(ours[name], plain[name], exact[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_computes_the_bits_of_inference(folder: Path, dtype: torch.dtype) -> None:
    model, batch = load(folder, "cpu", dtype), make_batch(LENGTHS)
    with torch.inference_mode():
        inference = logits_of(model, batch)
    training = logits_of(model, batch)
    assert training.requires_grad
    assert_same_bits([inference, training.detach()])


def test_gradients_do_not_depend_on_threads_or_instruction_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = load(folder, "cpu", torch.float32), make_batch(LENGTHS)
    targets = torch.randint(0, 300, (len(batch.ids),))
    torch.set_num_threads(1)
    one = gradients(model, batch, targets)
    torch.set_num_threads(2)
    monkeypatch.setattr(cpu, "_kernels", cpu._C.CpuKernels("scalar"))
    two = gradients(model, batch, targets)
    for name in one:
        assert_same_bits([one[name], two[name]])


def test_frozen_parameters_get_none_and_change_nothing(folder: Path) -> None:
    """As with adapters: the gradient passes through a frozen layer."""
    model, batch = load(folder, "cpu", torch.float32), make_batch(LENGTHS)
    targets = torch.randint(0, 300, (len(batch.ids),))
    everything = gradients(model, batch, targets)
    trained = "model.layers.0.self_attn.v_proj.weight"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == trained)
        parameter.grad = None
    some = gradients(model, batch, targets)
    assert some.keys() == {trained}
    assert_same_bits([some[trained], everything[trained]])


# ---- one op at a time ----

SPANS = Spans(
    torch.tensor([0, 3, 5], dtype=torch.int32),
    torch.tensor([3, 5], dtype=torch.int32),
    torch.tensor([[1, 2], [1, 0]], dtype=torch.int32),
)  # the second span goes on from the first page of the first
SLOTS = torch.tensor([3, 4, 5, 0, 1])
POSITIONS = torch.tensor([4, 0, 2, 1, 1])
TABLES = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(1)).unbind()  # no angle's: it serves as well
UNTURNED = Turn(POSITIONS, torch.ones(5, 2), torch.zeros(5, 2))


def attend_with(ops: Any) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor, *norms: Tensor) -> Tensor:
        pages = [torch.zeros(4, 1, 3, 4, dtype=key.dtype) for _ in range(2)]
        turn = Turn(POSITIONS, *TABLES, *norms, eps=1e-5)
        result: Tensor = ops.attend(query, key, value, turn, *pages, SLOTS, SPANS, 0.5)
        return result

    return attend


@pytest.mark.parametrize(
    ("ops", "dtype"), [(KERNELS, torch.int8), (reference, torch.int8), (reference, torch.float8_e4m3fn)]
)
def test_8_bit_pages_have_no_gradient(ops: Any, dtype: torch.dtype) -> None:
    pages = [torch.zeros(4, 1, 3, kv_rows.columns(4, dtype), dtype=dtype) for _ in range(2)]
    inputs = attention_inputs(torch.float32)
    with pytest.raises(ValueError, match="8-bit pages has no gradient"):
        ops.attend(*inputs, UNTURNED, *pages, SLOTS, SPANS, 0.5)
    with torch.no_grad():
        assert ops.attend(*inputs, UNTURNED, *pages, SLOTS, SPANS, 0.5).isfinite().all()


def attention_inputs(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(5, heads, 4, dtype=dtype, requires_grad=True) for heads in (2, 1, 1)]


IDS = torch.tensor([3, 1, 3])
CASES: dict[str, tuple[Callable[[Ops], Callable[..., Tensor]], list[tuple[int, ...]]]] = {
    "embedding": (lambda ops: lambda w: ops.embedding(IDS, w, w.dtype), [(5, 7)]),
    "linear": (lambda ops: ops.linear, [(4, 9), (5, 9), (5,)]),
    "rms_norm": (lambda ops: lambda x, w: ops.rms_norm(x, w, 1e-5), [(4, 3, 9), (9,)]),
    "add_rms_norm": (lambda ops: lambda *xw: torch.stack(ops.add_rms_norm(*xw, 1e-5)), [(4, 9), (4, 9), (9,)]),
    "attend": (attend_with, [(5, 2, 4), (5, 1, 4), (5, 1, 4)]),
    "attend, normed": (attend_with, [(5, 2, 4), (5, 1, 4), (5, 1, 4), (4,), (4,)]),
    "silu_product": (lambda ops: ops.silu_product, [(3, 20), (3, 20)]),
    "log_sum_exp": (lambda ops: ops.log_sum_exp, [(3, 20)]),
}


@pytest.mark.parametrize("name", CASES)
def test_an_op_has_the_bits_of_its_kernel_and_the_gradient_of_its_twin(name: str) -> None:
    make, shapes = CASES[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    result = make(KERNELS)(*inputs)  # type: ignore[arg-type]
    assert_same_bits([result.detach(), make(cpu)(*(x.detach() for x in inputs))])  # type: ignore[arg-type]
    towards = torch.randn(result.shape)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    gradients = (
        torch.autograd.grad(result, inputs, towards),
        torch.autograd.grad(make(reference)(*inputs), inputs, towards),  # type: ignore[arg-type]
        torch.autograd.grad(make(reference)(*doubles), doubles, towards.double()),  # type: ignore[arg-type]
    )
    for ours, twin, exact in zip(*gradients, strict=True):
        assert_as_exact_as_torch(ours, twin, exact)


def test_the_reference_path_is_differentiable() -> None:
    inputs = attention_inputs(torch.float64)
    assert torch.autograd.gradcheck(attend_with(reference), inputs, fast_mode=True)
    query, key, value = (x.detach() for x in inputs)
    pages = [torch.zeros(4, 1, 3, 4, dtype=torch.float64) for _ in range(2)]
    reference.attend(query, key.requires_grad_(), value, UNTURNED, *pages, SLOTS, SPANS, 0.5)
    assert torch.equal(pages[0].view(-1, 4)[SLOTS], key.detach()[:, 0])  # the caller's pages are written, too


def test_ids_that_come_often_add_up_in_the_order_of_the_rows() -> None:
    ids, towards = torch.randint(0, 3, (2000,)), torch.randn(2000, 40)
    weight = torch.randn(300, 40, requires_grad=True)
    expected = torch.zeros(300, 40)
    for i, row in zip(ids.tolist(), towards, strict=True):
        expected[i] += row
    for threads in (1, 2):
        torch.set_num_threads(threads)
        (grad,) = torch.autograd.grad(KERNELS.embedding(ids, weight, torch.float32), weight, towards)
        assert_same_bits([grad, expected])


def test_keys_of_an_earlier_step_are_refused() -> None:
    """They have no gradient to give; silence would train something else."""
    query, key, value = attention_inputs(torch.float32)
    pages = [torch.zeros(4, 1, 3, 4) for _ in range(2)]
    with pytest.raises(ValueError, match="3 of the keys that spans read come from an earlier step"):
        KERNELS.attend(
            query[3:], key[3:], value[3:], UNTURNED, *pages, SLOTS[3:],
            Spans(torch.tensor([0, 2], dtype=torch.int32), SPANS.kv_length[1:], SPANS.pages[1:]), 0.5,
        )  # fmt: skip
    with pytest.raises(ValueError, match="two rows of the batch write one slot"):
        KERNELS.attend(query, key, value, UNTURNED, *pages, SLOTS * 0 + 3, SPANS, 0.5)


def test_quantised_layers_are_refused() -> None:
    x, weight = torch.randn(3, 64), quantise_weight(torch.randn(5, 64), "int8")
    with pytest.raises(ValueError, match="no gradient"):
        KERNELS.quantised_linear(x.requires_grad_(), weight, None)
    with torch.no_grad():
        assert_same_bits([KERNELS.quantised_linear(x, weight, None), cpu.quantised_linear(x, weight, None)])


def test_pages_may_be_used_again_before_the_backward_pass() -> None:
    inputs = attention_inputs(torch.float32)
    pages = [torch.zeros(4, 1, 3, 4) for _ in range(2)]
    result = KERNELS.attend(*inputs, UNTURNED, *pages, SLOTS, SPANS, 0.5)
    expected = torch.autograd.grad(result.sum(), inputs, retain_graph=True)
    for x in pages:
        x.fill_(torch.nan)
    for a, b in zip(torch.autograd.grad(result.sum(), inputs), expected, strict=True):
        assert_same_bits([a, b])
