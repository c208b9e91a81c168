"""The Triton projections against loops in float64: in Triton's interpreter, or on a GPU where there is one.

The interpreter's bf16 arithmetic is wrong, so there it is float32 and float16 that are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from widellm.errors import BackendError, ConfigError
from widellm.kernels import gpu, reference

AVAILABLE, WHY = gpu.availability()
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=WHY)
if AVAILABLE:
    from widellm.kernels import triton_ops as ops
    from widellm.kernels import triton_tuning as tuning
    from widellm.kernels.triton_plan import plan_groups, plan_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
ROWS = [1, 2, 3, 7, 17, 33, 64, 65, 129]
ACTS = ["silu", "gelu", "gelu_tanh", "relu"]
SHAPES = [(33, 35, 7), (70, 60, 5), (64, 96, 3), (17, 11, 1), (48, 128, 2)]  # D, F, G


@pytest.fixture(autouse=True)
def _hostile_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    """What is allocated starts as NaN or 77, and no measured table is near."""
    monkeypatch.setenv("WIDELLM_CACHE", str(tmp_path))
    tuning.active_table.cache_clear()

    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return made.fill_(math.nan if made.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", poisoned)
    yield


def close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and torch.isfinite(got).all()
    limit = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[got.dtype]
    limit *= max(1.0, float(want.abs().max()) if want.numel() else 1.0)
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=limit)


def make(m: int, d: int, f: int, g: int, dtype: torch.dtype, input_major: bool, density: float = 0.5) -> dict[str, Any]:
    def tensor(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape) * scale).to(DEVICE, dtype)

    down = tensor(d, f, scale=f**-0.5)
    return {
        "x": tensor(m, d),
        "gate": tensor(f, d, scale=d**-0.5),
        "up": tensor(f, d, scale=d**-0.5),
        "down": down.t().contiguous().t() if input_major else down,
        "keep": (torch.rand(m, g) < density).to(DEVICE),
        "biases": [tensor(f), tensor(f), tensor(d)],
    }


@pytest.mark.requirement("R28")
@pytest.mark.requirement("R45")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_ffn(rows: int, dtype: torch.dtype) -> None:
    for i in {(rows + 2 * (dtype != torch.float32)) % 5, (rows + 1) % 5 if rows < 33 else rows % 5}:
        d, f, g = SHAPES[i]
        t = make(rows, d, f, g, dtype, input_major=(rows + i) % 2 == 0)
        gate, biases = (None if i == 3 else t["gate"]), ([None] * 3 if i == 2 else t["biases"])
        if gate is None:
            biases = [None, *biases[1:]]
        arguments = (t["x"], gate, t["up"], t["down"], t["keep"], ACTS[(i + rows) % 4], *biases)
        close(ops.routed_ffn(*arguments), reference.routed_ffn(*arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_projections(rows: int, dtype: torch.dtype) -> None:
    d, n, g = [(33, 35, 7), (64, 60, 4), (40, 12, 3)][rows % 3]
    t = make(rows, d, n, g, dtype, input_major=rows % 2 == 0)
    bias_in, bias_out = (t["biases"][1], t["biases"][2]) if rows % 3 else (None, None)
    close(ops.routed_in(t["x"], t["up"], t["keep"], bias_in), reference.routed_in(t["x"], t["up"], t["keep"], bias_in))
    h = torch.randn(rows, n).to(DEVICE, dtype)
    h[~t["keep"].repeat_interleave(n // g, 1)] = math.nan  # dropped inputs may hold anything
    got = ops.routed_out(h, t["down"], t["keep"], bias_out)
    close(got, reference.routed_out(h, t["down"], t["keep"], bias_out))


@pytest.mark.parametrize("rows", [0, 1, 9, 70])
@pytest.mark.parametrize("density", [0.0, 1.0], ids=["nothing", "everything"])
def test_nothing_everything_and_empty(rows: int, density: float) -> None:
    t = make(rows, 48, 60, 5, torch.float32, input_major=True, density=density)
    arguments = (t["x"], t["gate"], t["up"], t["down"], t["keep"], "silu", *t["biases"])
    close(ops.routed_ffn(*arguments), reference.routed_ffn(*arguments))
    close(ops.routed_in(t["x"], t["up"], t["keep"]), reference.routed_in(t["x"], t["up"], t["keep"]))
    h = torch.randn(rows, 60).to(DEVICE)
    close(ops.routed_out(h, t["down"], t["keep"]), reference.routed_out(h, t["down"], t["keep"]))


@pytest.mark.parametrize("rows", [1, 6, 70])
def test_groups_that_nobody_keeps_are_not_read(rows: int) -> None:
    t = make(rows, 64, 96, 6, torch.float16, input_major=True)
    t["keep"][:, [1, 4]] = False
    t["keep"][:, [0, 2, 3, 5]] = True
    for channels in (slice(16, 32), slice(64, 80)):
        for w in (t["gate"][channels], t["up"][channels], t["down"][:, channels]):
            w.fill_(math.nan)
    assert torch.isfinite(ops.routed_ffn(t["x"], t["gate"], t["up"], t["down"], t["keep"], "silu")).all()


@pytest.mark.requirement("R30")
@pytest.mark.parametrize("rows", [5, 70])
def test_a_row_does_not_depend_on_its_batch_mates_and_two_runs_agree_to_the_bit(rows: int) -> None:
    t, other = (make(rows, 72, 90, 5, torch.float32, input_major=True) for _ in range(2))
    x, keep = other["x"].clone(), other["keep"].clone()
    x[-1], keep[-1] = t["x"][0], t["keep"][0]
    weights = (t["gate"], t["up"], t["down"])
    first = ops.routed_ffn(t["x"], *weights, t["keep"], "silu")
    assert torch.equal(first, ops.routed_ffn(t["x"], *weights, t["keep"], "silu"))
    second = ops.routed_ffn(x, *weights, keep, "silu")
    # the zeros of a group that only a batch mate keeps are added too, which changes no bit but a zero's sign
    assert torch.equal(first[0], second[-1]) if DEVICE == "cuda" else torch.allclose(first[0], second[-1], atol=1e-6)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("act", ACTS)
def test_nan_is_passed_on_and_stays_in_its_row(rows: int, act: str) -> None:
    t = make(rows, 48, 60, 5, torch.float32, input_major=True, density=1.0)
    t["x"][1, 7] = math.nan
    got = ops.routed_ffn(t["x"], t["gate"], t["up"], t["down"], t["keep"], act)
    assert got[1].isnan().all() and not got[[i for i in range(rows) if i != 1]].isnan().any()


@pytest.mark.parametrize("rows", [6, 70])
def test_non_contiguous_inputs(rows: int) -> None:
    t = make(rows, 32, 40, 5, torch.float32, input_major=False)
    keep = t["keep"].t().contiguous().t()
    up = torch.randn(40, 64).to(DEVICE)[:, ::2]  # gaps between the numbers of a row
    for x in (torch.randn(32, rows).to(DEVICE).t(), torch.randn(rows, 64).to(DEVICE)[:, 8:40]):
        close(ops.routed_in(x, up, keep), reference.routed_in(x, up, keep))
        down = torch.randn(40, 32).to(DEVICE).t()
        arguments = (x, None, up, down, t["keep"][:1].expand(rows, 5), "relu")
        close(ops.routed_ffn(*arguments), reference.routed_ffn(*arguments))


@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 7, 5, 16), (1, 300, 33, 16), (3, 70, 6, 32), (1, 600, 2, 64)])
@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
def test_plans(shape: tuple[int, ...], density: float) -> None:
    batch, m, groups, tile = shape
    keep = (torch.rand(batch, m, groups) < density).to(DEVICE)
    plan = plan_rows(keep, tile)
    want = set()
    for index in range(batch * groups):
        rows = keep[index // groups, :, index % groups].nonzero().flatten()
        assert int(plan.counts[index]) == len(rows)
        assert torch.equal(plan.rows[index, : len(rows)].long(), rows)
        want |= {index << 16 | t for t in range(math.ceil(len(rows) / tile))}
    got = plan.work[: int(plan.total)].tolist()
    assert len(got) == len(want) and set(got) == want
    panels = [(entry & 0xFFFF) // 8 for entry in got]
    assert panels == sorted(panels)
    union = plan_groups(keep[0], tile)
    for index in range(len(union.counts)):
        ids = keep[0, index * tile : (index + 1) * tile].any(0).nonzero().flatten()
        assert torch.equal(union.groups[index, : int(union.counts[index])].long(), ids)


@pytest.mark.parametrize(("batch", "tq"), [(2, 50), (1, 130), (3, 1)])
def test_one_plan_serves_the_projection_and_the_attention(batch: int, tq: int) -> None:
    x, w, keep = torch.randn(batch * tq, 24), torch.randn(32, 24), torch.rand(batch, tq, 2) < 0.5
    k = torch.randn(batch, tq, 2, 8)
    x, w, keep, k = (t.to(DEVICE) for t in (x, w, keep, k))
    plan = ops.shared_plan(keep, w)
    assert (plan is None) == (batch * tq <= 64)
    q = ops.routed_in(x, w, keep.view(-1, 2), plan=plan)
    close(q, reference.routed_in(x, w, keep.view(-1, 2)))
    q = q.view(batch, tq, 4, 8)
    close(ops.routed_attention(q, k, k, keep, plan=plan), reference.routed_attention(q, k, k, keep))


@pytest.mark.parametrize(
    ("m", "d", "rank", "groups"), [(1, 200, 3, 5), (5, 64, 16, 70), (40, 129, 7, 11), (0, 8, 2, 2)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_router(m: int, d: int, rank: int, groups: int, dtype: torch.dtype) -> None:
    x = torch.randn(m, d).to(DEVICE, dtype)
    down, up, bias = (torch.randn(*s).to(DEVICE) for s in ((rank, d), (groups, rank), (groups,)))
    keep = ops.routed_keep(x, down, up, bias, 0.3)
    logits = x.double() @ down.double().t() @ up.double().t() + bias.double()
    sure = (logits - 0.3).abs() > 1e-4
    assert keep.dtype == torch.bool and keep.shape == (m, groups)
    assert torch.equal(keep[sure], (logits > 0.3)[sure])


def test_bad_arguments_are_named() -> None:
    t = make(3, 32, 40, 5, torch.float32, input_major=False)
    x, gate, up, down, keep = (t[name] for name in ("x", "gate", "up", "down", "keep"))
    cases = [
        ("x must be", (x[:, :31], gate, up, down, keep, "silu")),
        ("w_gate must be", (x.half(), gate, up, down, keep, "silu")),
        ("x must be", (x.double(), gate, up, down, keep, "silu")),
        ("w_gate must be", (x, gate[:39], up, down, keep, "silu")),
        ("w_down must be", (x, gate, up, down[:, :39], keep, "silu")),
        ("keep must be", (x, gate, up, down, keep[:2], "silu")),
        ("keep must be", (x, gate, up, down, keep.int(), "silu")),
        ("keep must be", (x, gate, up, down, keep[:, :3], "silu")),
        ("act must be", (x, gate, up, down, keep, "tanh")),
        ("b_gate is given", (x, None, up, down, keep, "silu", t["biases"][0])),
        ("b_down must be", (x, gate, up, down, keep, "silu", None, None, t["biases"][2][:31])),
    ]
    for message, arguments in cases:
        with pytest.raises(ValueError, match=message):
            ops.routed_ffn(*arguments)


@pytest.mark.parametrize("kind", ["ffn_in", "in", "out"])
def test_a_block_that_would_change_the_result_raises(kind: str) -> None:
    base = tuning.Config(16, 32, 32, 4, 2)
    assert tuning.check(base, kind, 64) == base
    part = "bk" if kind == "out" else "bn"
    for bad, size in ((64, 96), (32, 48), (256, 100), (24, 48), (8, 8), (0, 16)):
        with pytest.raises(ConfigError, match="block"):
            tuning.check(base._replace(**{part: bad}), kind, size)
    tuning.check(base._replace(**{part: 64}), kind, 100)  # nothing from 16 up divides 100: the last tile is masked
    t = make(5, 32, 96, 2, torch.float32, input_major=True)
    with pytest.raises(ConfigError, match="does not fit groups of 48"):
        if kind == "out":
            ops.project_out(torch.zeros(5, 96, device=DEVICE), t["down"], t["keep"], None, base)
        else:
            gate = t["gate"] if kind == "ffn_in" else None
            out = torch.zeros(5, 96, device=DEVICE)
            ops.project_in(t["x"], gate, t["up"], t["keep"], "silu", None, None, out, True, base)


@pytest.mark.parametrize("config", [(16, 16, 16, 4, 2), (16, 64, 32, 4, 2), (64, 32, 64, 4, 2), (128, 16, 32, 4, 1)])
@pytest.mark.parametrize("rows", [9, 150])
def test_every_block_size_gives_the_same_function(config: tuple[int, ...], rows: int) -> None:
    t = make(rows, 40, 192, 3, torch.float32, input_major=True)
    config = tuning.Config(*config)
    h = torch.zeros(rows, 192, device=DEVICE)
    ops.project_in(t["x"], t["gate"], t["up"], t["keep"], "silu", None, None, h, True, config)
    want = reference.routed_in(t["x"], t["up"], t["keep"]) * torch.nn.functional.silu(
        reference.routed_in(t["x"], t["gate"], t["keep"])
    )
    close(h, want)
    close(ops.project_out(h, t["down"], t["keep"], None, config), reference.routed_out(h, t["down"], t["keep"]))


def test_the_dense_way_out_is_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tuning.DEFAULTS, "sm80", tuning.DEFAULTS["sm90"])
    t = make(600, 24, 32, 2, torch.float32, input_major=True)
    arguments = (t["x"], t["gate"], t["up"], t["down"], t["keep"], "silu", *t["biases"])
    if DEVICE == "cpu":
        assert tuning.choose("out", ops.device_of(t["x"]), 600, 16, 16, 4) == tuning.DENSE
    close(ops.routed_ffn(*arguments), reference.routed_ffn(*arguments))
    h = torch.randn(600, 32).to(DEVICE)
    h[~t["keep"].repeat_interleave(16, 1)] = math.nan
    close(ops.routed_out(h, t["down"], t["keep"]), reference.routed_out(h, t["down"], t["keep"]))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(0, 80),
    d=st.integers(1, 70),
    size=st.integers(1, 40),
    groups=st.integers(1, 9),
    input_major=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fuzz(rows: int, d: int, size: int, groups: int, input_major: bool, seed: int) -> None:
    torch.manual_seed(seed)
    t = make(rows, d, size * groups, groups, DTYPES[seed % 2], input_major, density=seed / 99)
    arguments = (t["x"], t["gate"], t["up"], t["down"], t["keep"], ACTS[seed % 4], *t["biases"])
    close(ops.routed_ffn(*arguments), reference.routed_ffn(*arguments))


def test_tensors_that_no_compiler_serves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    t = make(3, 32, 40, 5, torch.float32, input_major=False)
    with pytest.raises(BackendError, match="runs on a GPU"):
        ops.routed_in(t["x"].cpu(), t["up"].cpu(), t["keep"].cpu())
