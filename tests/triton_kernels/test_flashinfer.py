"""Attention by FlashInfer: what it is told, shown by a stand-in that attends from that alone."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from palimpsest import ConfigError, Engine, EngineConfig, SamplingParams
from palimpsest.engine import reference
from palimpsest.tests.tiny_models import make_model_folder
from palimpsest.tests.triton_kernels.test_products import Case
from torch import Tensor


class Wrapper:
    """The names, order and shapes of flashinfer.BatchPrefillWithPagedKVCacheWrapper, in plain torch."""

    plans = 0

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8 and kv_layout == "HND"

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float,
        q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        Wrapper.plans += 1
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(table.dtype == torch.int32 for table in tables) and causal
        assert len(paged_kv_indices) == paged_kv_indptr[-1] and (paged_kv_last_page_len <= page_size).all()
        self.starts, self.pages, self.numbers, self.last = (table.tolist() for table in tables)
        self.shape, self.scale = (num_qo_heads, num_kv_heads, head_dim_qk, page_size), sm_scale
        self.dtypes = q_data_type, kv_data_type

    def run(self, query: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        heads, kv_heads, head_dim, page_size = self.shape
        assert query.shape[1:] == (heads, head_dim) and query.dtype == self.dtypes[0]
        for pages in paged_kv_cache:
            assert pages.shape[1:] == (kv_heads, page_size, head_dim) and pages.dtype == self.dtypes[1]
        out = torch.empty_like(query)
        for i, last in enumerate(self.last):
            numbers = self.numbers[self.pages[i] : self.pages[i + 1]]
            length = (len(numbers) - 1) * page_size + last
            key, value = (
                pages[numbers].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(heads // kv_heads, dim=0)
                for pages in paged_kv_cache
            )
            rows = slice(self.starts[i], self.starts[i + 1])
            scores = torch.einsum("thd,hkd->htk", query[rows].float(), key.float()) * self.scale
            count = rows.stop - rows.start
            hidden = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=2)
            out[rows] = torch.einsum("htk,hkd->thd", weights, value.float()).to(out.dtype)
        return out


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the stand-in attends on the CPU")
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(Wrapper, "plans", 0)


@pytest.mark.usefixtures("_stand_in")
def test_it_is_told_all_it_needs() -> None:
    from palimpsest.engine.flashinfer import FlashInfer

    case = Case(torch.device("cpu"), [1, 5, 8], [16, 5, 21], heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16)
    attend = FlashInfer(torch.bfloat16, 64, torch.device("cpu"))
    ours = attend(case.query, case.key, case.value, case.spans, case.scale)
    exact = reference.paged_attention(
        case.query.bfloat16().double(), case.key.double(), case.value.double(), case.spans, case.scale
    )
    assert ours.dtype == torch.float32 and (ours - exact).abs().max() < 2**-8 * exact.abs().max()
    again = attend(case.query, case.key, case.value, case.spans, case.scale)  # the next layer
    assert torch.equal(again, ours) and Wrapper.plans == 1


@pytest.mark.usefixtures("_stand_in")
def test_a_model_plans_once_per_step(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "qwen3", head_dim=64, num_hidden_layers=2)
    options = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "kv_bytes": 2**20, "max_step_tokens": 64}
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    (ours,), (plain,) = (
        Engine(folder, EngineConfig(backend="triton", attention=attention, **options)).generate([[5, 9, 7]], params)
        for attention in ("flashinfer", "triton")
    )
    assert Wrapper.plans == 2  # the prompt, and one step
    assert ours.logprobs == pytest.approx(plain.logprobs, abs=0.02)


def test_what_it_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as if it were not installed
    folder = make_model_folder(tmp_path, "qwen3", head_dim=64)

    def make(**options: object) -> None:
        Engine(folder, EngineConfig(backend="triton", attention="flashinfer", **options))  # type: ignore[arg-type]

    for options, reason in (
        ({}, "bfloat16 KV and heads of 64, 128, 256, not torch.float32 and 64"),
        ({"kv_dtype": "bfloat16"}, "needs the package flashinfer-python"),
        ({"kv_dtype": "bfloat16", "exact": True}, "exact=True rules out"),
    ):
        with pytest.raises(ConfigError, match=reason):
            make(**options)
