"""The Triton backend end to end: a tiny model draws the ids that plain torch draws."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from palimpsest import AgentConfig, ConfigError, Engine, EngineConfig, MemoryAgent, SamplingParams
from palimpsest.engine import checkpoint, cuda, kv_rows, reference, triton_ops
from palimpsest.engine.acceptance import Acceptance
from palimpsest.engine.draft import Drafter
from palimpsest.engine.ops import Turn, select
from palimpsest.engine.quant import replace_weights
from palimpsest.engine.runner import page_bytes
from palimpsest.engine.scaled_weight import ScaledWeight
from palimpsest.rl.trajectory import Trajectory
from palimpsest.tests.rl.test_trainer import (
    DOCUMENTS,
    SAMPLED,
    any_gradient,
    assert_close,
    config_of,
    make_engine,
    roll,
)
from palimpsest.tests.tiny_models import make_model_folder
from palimpsest.tests.triton_kernels.test_products import Case
from palimpsest.triton_kernels import attention


def test_the_ids_are_those_of_plain_torch(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "qwen3")
    prompts = [list(range(3, 40)), [5, 9]]
    params = [SamplingParams(temperature=t, max_tokens=3, ignore_eos=True) for t in (0.0, 1.0)]
    results = []
    for backend in ("triton", "reference"):
        engine = Engine(folder, EngineConfig(backend=backend, kv_bytes=2**20, max_step_tokens=64))
        assert engine.model.ops.backend == backend
        results.append(engine.generate(prompts, params))
    for ours, plain in zip(*results, strict=True):
        assert ours.token_ids == plain.token_ids
        assert ours.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


def test_attention_in_plain_torch_beside_the_other_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, results = make_model_folder(tmp_path, "qwen3", num_hidden_layers=1), []
    monkeypatch.setattr(attention, "paged_attention", lambda *_, **__: results.append("a kernel"))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for backend, kernels in (("triton", "reference"), ("reference", "auto")):
        engine = Engine(folder, EngineConfig(backend=backend, attention=kernels, kv_bytes=2**20))
        results.append(engine.generate([[5, 9, 7]], params)[0])
    ours, plain = results
    assert ours.token_ids == plain.token_ids and ours.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    with pytest.raises(ConfigError, match=r"attention='reference' .* exact=True rules out"):
        Engine(folder, EngineConfig(backend="triton", attention="reference", exact=True))


def test_what_it_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model_folder(tmp_path, "qwen2")
    with pytest.raises(ConfigError, match="does not run weights='int4'; use 'native', 'int8', 'fp8', or"):
        Engine(folder, EngineConfig(backend="triton", weights="int4"))
    with pytest.raises(ConfigError, match="KV pages of float32, bfloat16, float8_e4m3fn, not"):
        Engine(folder, EngineConfig(backend="triton", kv_dtype="int8"))
    with pytest.raises(ConfigError, match="float64"):
        Engine(folder, EngineConfig(backend="triton", dtype="float64"))
    monkeypatch.setattr(cuda, "unavailable", lambda: "it was built without nvcc")
    with pytest.raises(ConfigError, match="attention='cuda' cannot run here"):
        select("triton", torch.float32, torch.bfloat16, 128, 7, "cuda")
    with pytest.raises(
        ConfigError, match="'cuda' takes KV pages of bfloat16, not float32: use kv_dtype='bfloat16', or"
    ):
        Engine(folder, EngineConfig(backend="triton", attention="cuda"))
    for head_dim, group in ((96, 1), (128, 17)):
        with pytest.raises(
            ConfigError, match=f"'cuda' takes heads of 64 or 128, .* this model has {group} of {head_dim}, or"
        ):
            select("triton", torch.float32, torch.bfloat16, head_dim, group, "cuda")


@pytest.mark.parametrize(("weights", "kv_dtype"), [("fp8", "fp8"), ("int8", "bfloat16")])
def test_eight_bits(tmp_path: Path, weights: str, kv_dtype: str) -> None:
    folder = make_model_folder(tmp_path, "qwen2", tie_word_embeddings=weights == "int8")
    options = {"kv_dtype": kv_dtype, "kv_bytes": 2**20, "max_step_tokens": 64}
    ours = Engine(folder, EngineConfig(backend="triton", weights=weights, **options))
    twin = Engine(folder, EngineConfig(backend="reference", **options))
    packed = checkpoint.load(folder, torch.float32, weights).packed
    in_rows = {n: p if isinstance(p, ScaledWeight) else ScaledWeight.of_packed(p) for n, p in packed.items()}
    replace_weights(twin.model, in_rows)
    twin.runner.refresh()
    bytes_per_page = page_bytes(ours.model.config, 16, kv_rows.element_type(kv_dtype))
    assert len(ours.runner.pages[0].key) == 2**20 // bytes_per_page
    assert sum(p.key.nbytes + p.value.nbytes for p in ours.runner.pages) == 2**20 // bytes_per_page * bytes_per_page
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=True)
    (one,), (other,) = (engine.generate([list(range(3, 15))], params) for engine in (ours, twin))
    assert one.token_ids == other.token_ids
    assert one.prompt_logprobs == pytest.approx(other.prompt_logprobs, abs=0.02)  # weights of attention in bfloat16


def test_few_rows_of_eight_bits_go_to_the_gpu_s_own_kernel_but_not_in_exact_mode(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    taken = []

    def gemv(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: None) -> torch.Tensor:
        taken.append(len(x))
        return reference.scaled_linear(x, codes, scales, bias)

    monkeypatch.setattr(triton_ops, "INTERPRETED", SimpleNamespace(value=False))
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    monkeypatch.setattr(cuda, "gemv", gemv)
    codes, scales = torch.randint(-127, 128, (5, 32), device=device).to(torch.int8), torch.rand(5, device=device)
    for exact in (False, True):
        ops = triton_ops.TritonKernels(exact=exact)
        for rows in (1, 8, 9):
            x = torch.randn(rows, 32, device=device)
            expected = reference.scaled_linear(x, codes, scales, None)
            assert torch.allclose(ops.scaled_linear(x, codes, scales, None), expected, rtol=1e-4, atol=1e-3)
    assert taken == [1, 8]


def test_fp8_needs_a_gpu_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model_folder(tmp_path, "qwen2")
    for name, instead in (("weights", "int8"), ("kv_dtype", "bfloat16")):
        with pytest.raises(ConfigError, match=f"{name}='fp8' is for NVIDIA GPUs.*use {name}='{instead}'"):
            Engine(folder, EngineConfig(backend="cpu", **{name: "fp8"}))
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
            patch.setattr(torch.cuda, "get_device_name", lambda: "Old")
            with pytest.raises(ConfigError, match=f"{name}='fp8' needs .* 8.9 .*Old has 8.0; use {name}"):
                Engine(folder, EngineConfig(backend="triton", **{name: "fp8"}))


@pytest.mark.parametrize(
    ("failure", "capability", "reason"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), (9, 0), "finds none: Torch not compiled with CUDA"),
        (
            RuntimeError("The NVIDIA driver on your system is too old\nmore"),
            (9, 0),
            "driver on your system is too old;",
        ),
        (None, (7, 5), r"compute capability 8.0 \(Ampere\) or later, and Old has 7.5"),
    ],
)
def test_a_gpu_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, failure: Exception | None, capability: tuple[int, int], reason: str
) -> None:
    def init() -> None:
        if failure is not None:
            raise failure

    monkeypatch.setattr(triton_ops, "INTERPRETED", SimpleNamespace(value=False))
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old")
    with pytest.raises(ConfigError, match=reason):
        select("triton", torch.float32, torch.float32, 64, 1)


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 6), True), ((9, 0), True), ((10, 0), False)])
def test_machine_code_is_for_some_architectures(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: bool
) -> None:
    monkeypatch.setattr(cuda, "_C", SimpleNamespace(cuda_device_count=lambda: 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    reason = cuda.unavailable()
    assert reason is None if runs else "built for 8.x and 9.x" in str(reason)


def test_prompts_of_a_group_share_their_first_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE", 64)
    folder = make_model_folder(tmp_path, "qwen3", num_hidden_layers=1)
    shared, found = list(range(3, 67)), []
    find = attention.SharedPrefix.find

    def spy(*arguments: object) -> attention.SharedPrefix | None:
        found.append(find(*arguments))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(attention.SharedPrefix, "find", spy)
    results = []
    for backend, exact in (("triton", True), ("reference", False)):
        config = EngineConfig(backend=backend, exact=exact, graphs=False, drafts=False, kv_bytes=2**20)
        engine = Engine(folder, config)
        prompts = [[*shared, *tail] for tail in ([5], [9, 8])]
        results.append(engine.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)))
    for ours, plain in zip(*results, strict=True):
        assert ours.token_ids == plain.token_ids
        assert ours.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert [one.skipped.tolist() for one in found if one is not None] == [[1, 1]]


def test_the_gpu_s_own_decode_leaves_to_the_group_what_it_shares(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """On sm_90 both cut the context into the same tiles; else Triton's kernels do all of a step that may share."""
    case = Case(device, [1, 1], [70, 70], 2, 2, 64, torch.bfloat16)
    case.spans.pages[1, :8] = case.spans.pages[0, :8]
    skipped: list[list[int]] = []

    def partials(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        skipped.append(arguments[6].tolist())
        tiles = -(-case.spans.pages.shape[1] * 8 // 64)
        peaks, totals, values = torch.zeros(2, 2, tiles), torch.ones(2, 2, tiles), torch.zeros(2, 2, tiles, 64)
        return peaks.to(device), totals.to(device), values.to(device), 64

    monkeypatch.setattr(triton_ops, "INTERPRETED", SimpleNamespace(value=False))
    monkeypatch.setattr(attention, "TILE", 64)
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    monkeypatch.setattr(cuda, "paged_decode_partials", partials)
    key = value = torch.randn(2, 2, 64, device=device)
    slots = case.spans.pages[:, 8].long() * 8 + 5
    turn = Turn(torch.zeros(2, dtype=torch.int64, device=device), *torch.randn(2, 1, 32, device=device))
    for tile, calls in ((64, 1), (128, 0)):
        skipped.clear()
        monkeypatch.setattr(cuda, "decode_tile", lambda tile=tile: tile)
        ops = triton_ops.TritonKernels()
        ops.attend(case.query, key, value, turn, case.key, case.value, slots, case.spans, case.scale)
        assert skipped == [[1, 1]] * calls


def test_out_of_memory_says_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(batch: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has more to say")

    engine = make_engine(make_model_folder(tmp_path, "qwen2"), backend="triton", graphs=False)
    monkeypatch.setattr(engine.runner, "run_layers", full)
    said = (
        r"a step of 3 tokens asked for 20.00 MiB more and does not fit: .* GiB of \S+ are free; lower .*max_step_tokens"
    )
    with pytest.raises(ConfigError, match=said):
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1))


def test_drafts_change_nothing_with_exact_kernels(tmp_path: Path) -> None:
    engine = make_engine(make_model_folder(tmp_path, "qwen2"), backend="triton", exact=True)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=4, ignore_eos=True)
    prompt = [5, 6, 7, 8, 9, 10]
    (plain,) = engine.generate([prompt], params)
    guess = plain.token_ids[:2] + array("i", [1, 1])
    engine.add(prompt, params, drafter=Drafter({"memory": guess}, Acceptance(), repeats=True))
    drafted = next(u.completion for _ in range(9) for u in engine.step() if u.completion)
    assert drafted.counters.drafts["memory"].accepted == 2
    assert drafted.token_ids == plain.token_ids
    # The interpreter multiplies by numpy, whose bits depend on the shape of a block; a GPU's do not.
    close = pytest.approx(plain.logprobs, abs=1e-5)
    assert drafted.logprobs == (plain.logprobs if torch.cuda.is_available() else close)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="tests/engine/test_graphs.py has a stand-in for the GPU")
@pytest.mark.parametrize("exact", [True, False])
def test_graph_is_eager(tmp_path: Path, exact: bool) -> None:
    folder = make_model_folder(tmp_path, "qwen3")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    prompts = [list(range(3, 3 + length)) for length in (1, 5, 300)]
    results = []
    for graphs in (True, False):
        engine = make_engine(folder, backend="triton", exact=exact, graphs=graphs)
        assert (engine.runner.graphs is not None) == (engine.graph_bytes > 0) == graphs
        results.append(engine.generate(prompts, params))
    for ours, plain in zip(*results, strict=True):
        assert ours.token_ids == plain.token_ids
        assert ours.logprobs == (plain.logprobs if exact else pytest.approx(plain.logprobs, abs=1e-4))


def test_the_gradient_is_that_of_the_cpu(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "qwen2", tie_word_embeddings=True)
    on_cpu = make_engine(folder, backend="cpu")
    agent = AgentConfig(chunk_tokens=60, memory_tokens=3, answer_tokens=2, sampling=SAMPLED)
    (group,) = roll(MemoryAgent(on_cpu, agent), size=2, documents=[DOCUMENTS[1][:100]])
    short = replace(group, trajectories=[_with_short_prompts(trajectory) for trajectory in group.trajectories])
    expected, _ = any_gradient(on_cpu, config_of(), [short])
    ours, _ = any_gradient(make_engine(folder, backend="triton", graphs=False), config_of(), [short])
    assert_close({name: gradient.cpu() for name, gradient in ours.items()}, expected, 1e-4)


def _with_short_prompts(trajectory: Trajectory) -> Trajectory:
    """The interpreter takes its time."""
    return replace(trajectory, turns=[replace(turn, prompt_ids=turn.prompt_ids[-4:]) for turn in trajectory.turns])
