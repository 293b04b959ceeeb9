from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from palimpsest.engine import checkpoint, slab
from palimpsest.engine.slab import Slab
from palimpsest.tests.tiny_models import make_model_folder
from torch import Tensor


def test_tensors_lie_side_by_side_in_storages_of_their_own() -> None:
    place = Slab()
    given = [torch.arange(n, dtype=dtype) for n, dtype in ((7, torch.uint8), (5, torch.float32), (9, torch.bfloat16))]
    copies = [place.copy(t) for t in given]
    first = copies[0].data_ptr()
    assert [t.data_ptr() - first for t in copies] == [0, 64, 128]
    assert [t.untyped_storage().nbytes() for t in copies] == [t.nbytes for t in given]
    copies[1].zero_()
    assert [t.sum().item() for t in copies] == [21, 0, 36]


def test_a_full_chunk_is_followed_by_another_and_lives_as_long_as_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab, "CHUNK_BYTES", 4096)
    place = Slab()
    tensors = [place.copy(torch.full((n,), n)) for n in (500, 100, 3000, 0)]  # 3000: more than a chunk
    del place
    assert [t.tolist() for t in tensors] == [[n] * n for n in (500, 100, 3000, 0)]
    assert tensors[1].data_ptr() - tensors[0].data_ptr() != 4032


@pytest.mark.parametrize("weights", ["native", "int8", "int4"])
def test_a_loaded_model_lies_in_one_chunk(tmp_path: Path, weights: str) -> None:
    loaded = checkpoint.load(make_model_folder(tmp_path / "m"), torch.bfloat16, weights)
    packed: list[Tensor] = [t for weight in loaded.packed.values() for t in (weight.values, weight.scales)]
    tensors = sorted([*loaded.parameters.values(), *packed], key=Tensor.data_ptr)
    gaps = [b.data_ptr() - a.data_ptr() - a.nbytes for a, b in pairwise(tensors)]
    assert all(0 <= gap < 64 for gap in gaps)
