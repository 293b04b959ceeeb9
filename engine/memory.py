"""How much memory this process may still take, and how many pages of KV that makes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from .config import EngineConfig
from .errors import ConfigError

__all__ = ["available_bytes", "bytes_held", "explained", "pool_pages"]

CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Bytes free for this process: a GPU's; or the machine's, or what its container has left (cgroup v2) if less."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(min(free, int(limit) - used), 0)


def bytes_held(make: Callable[[], object], device: torch.device) -> int:
    """Bytes of a GPU that lie behind what `make` gives, which is let go again."""
    torch.cuda.empty_cache()
    free = available_bytes(device)
    made = make()
    taken = free - available_bytes(device)
    del made
    torch.cuda.empty_cache()
    return max(taken, 0)


def pool_pages(config: EngineConfig, bytes_per_page: int, window: int, device: torch.device, reserved: int = 0) -> int:
    """Pages of the KV pool: kv_bytes if given, else kv_share of what is free, at most max_sequences full windows.

    reserved: bytes that are free now and will not be.

    Raises ConfigError when that is not one page.
    """
    if config.kv_bytes is not None:
        pages = config.kv_bytes // bytes_per_page
    else:
        free = max(available_bytes(device) - reserved, 0)
        wanted = config.max_sequences * -(-window // config.page_size)
        pages = min(wanted, int(free * config.kv_share) // bytes_per_page)
    if pages < 1:
        given = f"kv_bytes={config.kv_bytes}" if config.kv_bytes is not None else f"kv_share={config.kv_share}"
        raise ConfigError(f"{given} holds not even one page of {bytes_per_page} bytes; raise it or lower page_size")
    return pages


@contextmanager
def explained(what: str, device: torch.device, remedy: str) -> Iterator[None]:
    """Raise ConfigError when `device` runs out of memory: what wanted how much, what is free, and what helps."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        size = "" if asked is None else f" asked for {asked[1]} more and"
        free = available_bytes(device) / 2**30
        raise ConfigError(f"{what}{size} does not fit: {free:.2f} GiB of {device} are free; {remedy}") from error
