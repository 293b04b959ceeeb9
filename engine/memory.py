"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["available_bytes"]

CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes free for this process: the machine's, or those left in its container (cgroup v2) when that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(min(free, int(limit) - used), 0)
