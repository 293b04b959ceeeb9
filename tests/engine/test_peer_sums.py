"""Sums through peers' memory: who is asked for what, shown by stand-ins for the extension and the process group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from palimpsest.engine import checkpoint, cuda, parallel, peer_sums
from palimpsest.engine.model_config import ModelConfig
from palimpsest.engine.peer_sums import CAPACITY, ONE_SHOT_BYTES, PeerSums, connect
from palimpsest.tests.tiny_models import make_model_folder


class Extension:
    """Of a rank whose memory lies at 100; that of handle b"h" + n at 1000 + n. closed: handles that can't be opened."""

    def __init__(self, *closed: bytes) -> None:
        self.closed, self.calls = closed, []

    def cuda_all_reduce_bytes(self, capacity: int) -> int:
        return 3 * 4 * capacity

    def cuda_peer_allocate(self, size: int) -> int:
        assert size == 3 * 4 * CAPACITY
        return 100

    def cuda_peer_handle(self, address: int) -> bytes:
        assert address == 100
        return b"own"

    def cuda_peer_open(self, handle: bytes) -> int:
        if handle in self.closed:
            raise RuntimeError("memory of another rank: peer access is not supported between these two devices")
        return 1000 + handle[1]

    def cuda_all_reduce(self, *arguments: Any) -> None:
        self.calls.append(arguments)


def ranks(monkeypatch: pytest.MonkeyPatch, rank: int, offers: list[Any], failures: list[Any]) -> None:
    """The process group of rank `rank`, whose others offer and report what is given; None: its own."""
    given = iter((offers, failures))

    def gather(values: list[Any], own: Any, group: object) -> None:
        values[:] = [own if other == rank else theirs for other, theirs in enumerate(next(given))]

    monkeypatch.setattr(dist, "get_rank", lambda group: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: len(offers))
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(peer_sums.socket, "gethostname", lambda: "here")


def offer(number: int, host: str = "here", reason: str | None = None) -> tuple[str | None, str, bytes]:
    return reason, host, bytes([ord("h"), number])


@pytest.mark.parametrize(
    ("offers", "failures", "closed", "reason"),
    [
        ([offer(0), None, offer(2, reason="no GPU there")], [], (), "no GPU there"),
        ([offer(0), None, offer(2, host="there")], [], (), "several machines"),
        ([offer(0), None, offer(2)], [None] * 3, (b"h\2",), "peer access is not supported"),
        ([offer(0), None, offer(2)], [None, None, "not from here"], (), "not from here"),
        ([offer(0), *[None] * 8], [], (), "9 ranks, and at most 8"),
    ],
)
def test_why_there_are_none(
    monkeypatch: pytest.MonkeyPatch, offers: list[Any], failures: list[Any], closed: tuple[bytes, ...], reason: str
) -> None:
    ranks(monkeypatch, 1, offers, failures)
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    monkeypatch.setattr(cuda, "_C", Extension(*closed))
    assert reason in str(connect(None))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, 0, [None, offer(1)], [])
    assert connect(None) == cuda.unavailable()  # type: ignore[arg-type]


def test_a_sum_reads_the_regions_in_the_order_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, 1, [offer(0), None, offer(2)], [None] * 3)
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    extension = Extension()
    monkeypatch.setattr(cuda, "_C", extension)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    sums = connect(None)  # type: ignore[arg-type]
    assert isinstance(sums, PeerSums)
    most = ONE_SHOT_BYTES // 4
    for count in (most, most + 4):
        x = torch.zeros(count)
        out = sums(x)
        *_, last = extension.calls
        assert last == (
            *(x.data_ptr(), out.data_ptr(), count, CAPACITY, [1000, 100, 1002], 1, count > most), 7
        )  # fmt: skip
    assert not sums.fits(torch.zeros(8))  # not on a GPU


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


class Negative:
    def fits(self, x: torch.Tensor) -> bool:
        return x.dtype == torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return -x


def test_what_does_not_fit_is_gathered(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_hf(checkpoint.read_json(make_model_folder(tmp_path, "qwen2") / "config.json"))
    one = parallel.TensorParallel(group, config)
    x = torch.randn(3, 4)
    assert torch.equal(one.sum(x), x)
    monkeypatch.setattr(one, "_peers", Negative())
    assert torch.equal(one.sum(x), -x)
    assert torch.equal(one.sum(x.double()), x.double())
    monkeypatch.setattr(parallel, "connect", lambda group: "no peers")
    with pytest.warns(UserWarning, match="go through NCCL, which takes longer: no peers"):
        assert one._connect() is None
