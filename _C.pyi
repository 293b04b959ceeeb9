"""Types of the compiled extension. Tensors travel as addresses; engine/cpu.py makes the checks."""

class CpuKernels:
    """The CPU kernels for one instruction set: "scalar", "avx2", "avx512", or "best" for the fastest one here.

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
        kv_bf16: bool,
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
        kv_bf16: bool,
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
    def multiply_add(self, repeats: int, /) -> float: ...
    def read_memory(self, data: int, n: int, /) -> float: ...
