"""The CUDA kernels of the extension: what they take, their checks and their calls. `triton_ops` chooses among them.

They are there when the extension was built with nvcc, for GPUs of compute capability 8.x and 9.x (CMakeLists.txt).
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    from .. import _C
except ImportError:  # an installation without a compiler
    _C = None  # type: ignore[assignment]

__all__ = [
    "GEMV_ROWS",
    "all_reduce",
    "decode_tile",
    "fits_decode",
    "fits_gemv",
    "gemv",
    "open_region",
    "paged_decode_partials",
    "peer_region",
    "unavailable",
    "unfit_for_decode",
]

MAJORS = (8, 9)  # of compute capability: machine code runs on no other
GEMV_ROWS = 8
HEAD_DIMS = (64, 128)
LARGEST_GROUP = 16
# As csrc/cuda/kernels.h numbers them.
WEIGHT_TYPES = {torch.bfloat16: 0, torch.int8: 1, torch.float8_e4m3fn: 2}


def unavailable() -> str | None:
    """Why the kernels cannot run here; None when they can."""
    if _C is None or not hasattr(_C, "cuda_device_count"):
        return "the extension was built without nvcc"
    if not torch.cuda.is_available() or not _C.cuda_device_count():
        return "there is no GPU, or its driver is too old for this build"
    major, minor = torch.cuda.get_device_capability()
    if major not in MAJORS:
        return f"this GPU has compute capability {major}.{minor}, and the kernels are built for 8.x and 9.x"
    return None


def fits_gemv(x: Tensor, weight: Tensor) -> bool:
    """Whether `gemv` takes this product: few rows, a type that it knows, rows of W of whole 16 bytes."""
    few = 0 < x.shape[0] <= GEMV_ROWS
    whole = weight.dtype in WEIGHT_TYPES and weight.shape[1] * weight.element_size() % 16 == 0
    return few and whole and x.stride(1) == 1 and weight.is_contiguous() and weight.data_ptr() % 16 == 0


def gemv(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """float32 [1 to 8, in], bfloat16, int8 or float8_e4m3fn [out, in], float32 [out], [out] -> float32 [rows, out].

    x is rounded to bfloat16, sums are float32: y = x (W * scales)^T + b. `fits_gemv` must hold.
    Twins: reference.linear and reference.scaled_linear.
    """
    rows, size = x.shape
    out = torch.empty(rows, len(weight), dtype=torch.float32, device=x.device)
    _C.cuda_gemv(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        WEIGHT_TYPES[weight.dtype],
        0 if scales is None else scales.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        bias is not None and bias.dtype == torch.bfloat16,
        out.data_ptr(),
        *(rows, size, len(weight)),
        torch.cuda.current_stream().cuda_stream,
    )
    return out


def peer_region(capacity: int) -> tuple[int, bytes]:
    """Memory for `all_reduce` of up to `capacity` numbers, which other processes can map; -> its address and handle.

    It stays until the process ends. Raises RuntimeError with CUDA's own words.
    """
    address = _C.cuda_peer_allocate(_C.cuda_all_reduce_bytes(capacity))
    return address, _C.cuda_peer_handle(address)


def open_region(handle: bytes) -> int:
    """The address of another process's region. Raises RuntimeError where the GPUs cannot reach each other."""
    return int(_C.cuda_peer_open(handle))


def all_reduce(x: Tensor, out: Tensor, capacity: int, regions: list[int], rank: int, *, two_shot: bool) -> None:
    """out = the sum of all ranks' x, in the order of the ranks; both float32, dense, 16-byte aligned.

    regions: of each rank, for up to `capacity` numbers. two_shot: each rank sums a part of them and reads the others'.
    Twin: the fold of parallel.py.
    """
    _C.cuda_all_reduce(
        *(x.data_ptr(), out.data_ptr(), x.numel(), capacity, regions, rank, two_shot),
        torch.cuda.current_stream().cuda_stream,
    )


def unfit_for_decode(pages: torch.dtype, head_dim: int, group: int) -> str | None:
    """Why `paged_decode_partials` takes no model with such pages and heads, `group` of them per key head; else None."""
    if pages != torch.bfloat16:
        return f"KV pages of bfloat16, not {str(pages).removeprefix('torch.')}: use kv_dtype='bfloat16'"
    if head_dim not in HEAD_DIMS or group > LARGEST_GROUP:
        sizes = " or ".join(map(str, HEAD_DIMS))
        return f"heads of {sizes}, at most {LARGEST_GROUP} per key head; this model has {group} of {head_dim}"
    return None


def fits_decode(query: Tensor, key_pages: Tensor, spans: int) -> bool:
    """Whether `paged_decode_partials` takes this step: one row per span, and a model that it knows."""
    tokens, heads, head_dim = query.shape
    return tokens == spans and unfit_for_decode(key_pages.dtype, head_dim, heads // key_pages.shape[1]) is None


def decode_tile() -> int:
    """Tokens of a tile of `paged_decode_partials` on the current device."""
    return int(_C.cuda_decode_tile())


def paged_decode_partials(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, kv_length: Tensor, pages: Tensor, scale: float,
    skipped: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, int]:  # fmt: skip
    """One row per span: query float32 [spans, heads, head_dim], dense; the rest as ops.Ops.attend takes it.

    -> each tile's largest score and sum of 2^(score - largest), float32 [spans, heads, tiles], its sum of
    2^(score - largest) * value, float32 [spans, heads, tiles, head_dim], and the tokens of a tile. Scores are
    scale q k log2(e), of q rounded to bfloat16; tiles beyond a span's length are not written, nor
    its first skipped[span] ones (int32 [spans]). `fits_decode` must hold.
    Twin, with the fold of the tiles: reference.paged_attention.
    """
    spans, heads, head_dim = query.shape
    kv_heads, page_size = key_pages.shape[1:3]
    width = decode_tile()
    tiles = -(-pages.shape[1] * page_size // width)
    peaks, totals = (torch.empty(spans, heads, tiles, dtype=torch.float32, device=query.device) for _ in range(2))
    partials = torch.empty(spans, heads, tiles, head_dim, dtype=torch.float32, device=query.device)
    if spans:
        _C.cuda_paged_decode(
            *(query.data_ptr(), key_pages.data_ptr(), value_pages.data_ptr(), kv_length.data_ptr(), pages.data_ptr()),
            0 if skipped is None else skipped.data_ptr(),
            *(pages.stride(0), spans, heads, kv_heads, head_dim, page_size, tiles),
            scale,
            *(peaks.data_ptr(), totals.data_ptr(), partials.data_ptr(), torch.cuda.current_stream().cuda_stream),
        )
    return peaks, totals, partials, width
