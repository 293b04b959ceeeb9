"""Types of the compiled extension. Tensors travel as addresses; engine/cpu.py makes the checks."""

from array import array
from collections.abc import Sequence

# values, scales, minima, bits, in, out, scale_groups, scale_shift
_Packed = tuple[int, int, int, int, int, int, int, int]
# (seed, sample, turn, index), temperature, top_k, top_p, depth
_Draw = tuple[tuple[int, int, int, int], float, int, float, float]

class CpuKernels:
    """The CPU kernels for one instruction set: "scalar", "avx2", "avx512", "avx512vnni", or "best".

    Raises ValueError for one that this machine lacks.
    """

    def __init__(self, isa: str) -> None: ...
    @property
    def isa(self) -> str: ...
    def rms_norm(
        self, x: int, weight: int, weight_bf16: bool, out: int, rows: int, n: int, x_stride: int, eps: float, /
    ) -> None: ...
    def linear(
        self,
        x: int,
        x_stride: int,
        weight: int,
        weight_bf16: bool,
        bias: int,
        bias_bf16: bool,
        y: int,
        rows: int,
        in_: int,
        out: int,
        /,
    ) -> None: ...
    def paged_attention(
        self,
        query: int,
        query_stride: int,
        key_pages: int,
        value_pages: int,
        kv_type: int,
        query_start: int,
        kv_length: int,
        pages: int,
        pages_stride: int,
        spans: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        page_count: int,
        scale: float,
        out: int,
        stats: int,
        /,
    ) -> None: ...
    def silu_product(
        self, gate: int, gate_stride: int, up: int, up_stride: int, out: int, rows: int, n: int, /
    ) -> None: ...
    def rotate(
        self,
        x: int,
        x_stride: int,
        positions: int,
        cos: int,
        sin: int,
        window: int,
        out: int,
        tokens: int,
        heads: int,
        head_dim: int,
        /,
    ) -> None: ...
    def write_kv(
        self,
        key: int,
        key_stride: int,
        value: int,
        value_stride: int,
        key_pages: int,
        value_pages: int,
        kv_type: int,
        slots: int,
        tokens: int,
        kv_heads: int,
        page_count: int,
        page_size: int,
        head_dim: int,
        /,
    ) -> None: ...
    def embedding(
        self, ids: int, weight: int, weight_bf16: bool, vocabulary: int, out: int, tokens: int, hidden: int, /
    ) -> None: ...
    def log_sum_exp(self, x: int, x_stride: int, out: int, rows: int, n: int, /) -> None: ...
    def draw(
        self, logits: int, stride: int, vocabulary: int, rows: Sequence[_Draw], /
    ) -> list[tuple[int, float, float]]: ...
    def quantised_linear(
        self,
        x: int,
        x_stride: int,
        rows: int,
        weight: _Packed,
        bias: int,
        bias_bf16: bool,
        y: int,
        /,
    ) -> None: ...
    def linear_input_grad(
        self, dy: int, weight: int, weight_bf16: bool, dx: int, rows: int, in_: int, out: int, /
    ) -> None: ...
    def linear_weight_grad(
        self, dy: int, x: int, x_stride: int, dw: int, rows: int, in_: int, out: int, add: bool, /
    ) -> None: ...
    def column_sums(self, x: int, out: int, rows: int, n: int, /) -> None: ...
    def silu_product_grad(
        self,
        gate: int,
        gate_stride: int,
        up: int,
        up_stride: int,
        dy: int,
        dgate: int,
        dup: int,
        rows: int,
        n: int,
        /,
    ) -> None: ...
    def log_sum_exp_grad(self, x: int, x_stride: int, result: int, dy: int, dx: int, rows: int, n: int, /) -> None: ...
    def token_scores(
        self,
        logits: int,
        temperature: float,
        targets: int,
        logprobs: int,
        entropies: int,
        log_sums: int,
        rows: int,
        n: int,
        /,
    ) -> None: ...
    def token_scores_grad(
        self,
        logits: int,
        temperature: float,
        targets: int,
        entropies: int,
        log_sums: int,
        logprob_grads: int,
        entropy_grads: int,
        rows: int,
        n: int,
        /,
    ) -> None: ...
    def attention_backward(
        self,
        query: int,
        key: int,
        value: int,
        query_start: int,
        kv_length: int,
        rows: int,
        rows_stride: int,
        spans: int,
        tokens: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        stats: int,
        out_grad: int,
        delta: int,
        query_grad: int,
        key_grad: int,
        value_grad: int,
        /,
    ) -> None: ...
    def multiply_add(self, repeats: int, /) -> float: ...
    def read_memory(self, data: int, n: int, /) -> float: ...

_Parameter = tuple[int, bool]
_Linear = tuple[_Parameter, _Parameter, int, int, _Packed | None]

class CpuDecoder:
    """The layer stack of one model over one set of pages; arguments as in csrc/cpu/decoder.h."""

    def __init__(
        self,
        isa: str,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        vocabulary: int,
        window: int,
        page_size: int,
        page_count: int,
        kv_type: int,
        eps: float,
        scale: float,
        cos: int,
        sin: int,
        embedding: _Parameter,
        norm: _Parameter,
        /,
    ) -> None: ...
    def add_layer(
        self, norms: list[_Parameter], linears: list[_Linear], key_pages: int, value_pages: int, /
    ) -> None: ...
    def run(
        self,
        ids: int,
        positions: int,
        slots: int,
        tokens: int,
        query_start: int,
        kv_length: int,
        pages: int,
        wanted_start: int,
        pages_stride: int,
        spans: int,
        hidden: int,
        /,
    ) -> None: ...

def use_huge_pages(ranges: list[tuple[int, int]], /) -> None: ...

class SuffixAutomaton:
    """As its Python twin in engine/suffix_automaton.py. Raises ValueError for ids that are no array of int32."""

    def __init__(self) -> None: ...
    @property
    def states(self) -> int: ...
    def add(self) -> int: ...
    def extend(self, text: int, ids: array[int], /) -> None: ...
    def advance(self, ids: array[int], /) -> None: ...
    def match(self) -> tuple[int, int, int]: ...

# Only in an extension that was built with nvcc; addresses on the device, `stream` as torch gives it.
def cuda_device_count() -> int: ...
def cuda_gemv(
    x: int,
    x_stride: int,
    weight: int,
    type: int,
    scales: int,
    bias: int,
    bias_bf16: bool,
    y: int,
    rows: int,
    in_: int,
    out: int,
    stream: int,
    /,
) -> None: ...
def cuda_decode_tile() -> int: ...
def cuda_all_reduce(
    x: int, y: int, count: int, capacity: int, regions: list[int], rank: int, two_shot: bool, stream: int, /
) -> None: ...
def cuda_all_reduce_bytes(capacity: int, /) -> int: ...
def cuda_peer_allocate(bytes: int, /) -> int: ...
def cuda_peer_handle(address: int, /) -> bytes: ...
def cuda_peer_open(handle: bytes, /) -> int: ...
def cuda_paged_decode(
    query: int,
    key_pages: int,
    value_pages: int,
    kv_length: int,
    tables: int,
    skipped: int,
    table_stride: int,
    spans: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    tiles: int,
    scale: float,
    peaks: int,
    totals: int,
    partials: int,
    stream: int,
    /,
) -> None: ...
