"""The native CPU ops against loops over rows, groups and heads in float64, for every instruction set of this CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from widellm.errors import BackendError
from widellm.kernels import cpu, native

AVAILABLE, WHY = cpu.availability()
pytestmark = [pytest.mark.skipif(not AVAILABLE, reason=WHY), pytest.mark.usefixtures("hostile_memory")]
LEVELS = cpu.levels() if AVAILABLE else []
DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 3, 7, 8, 17, 32, 33, 64, 129]
ACTS = ["silu", "gelu", "gelu_tanh", "relu"]


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Float32 sums differ from float64 ones by little; in bf16 a value near a tie may round the other way."""
    assert got.dtype == dtype and got.shape == want.shape
    limit = (2e-5 if dtype == torch.float32 else 2e-2) * max(1.0, float(want.abs().max()) if want.numel() else 1.0)
    assert not torch.isnan(got).any()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=limit)


def activation(x: Tensor, act: str) -> Tensor:
    if act == "silu":
        return x / (1 + torch.exp(-x))
    if act == "relu":
        return x.clamp(min=0)
    if act == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def dumb_in(x: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.zeros(x.shape[0], w.shape[0], dtype=torch.float64)
    size = w.shape[0] // keep.shape[1]
    for m in range(x.shape[0]):
        for n in range(w.shape[0]):
            if keep[m, n // size]:
                out[m, n] = w[n].double() @ x[m].double() + (0 if bias is None else bias[n].double())
    return out


def dumb_out(h: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None) -> Tensor:
    kept = keep.repeat_interleave(w.shape[1] // keep.shape[1], 1)
    out = torch.zeros(h.shape[0], w.shape[0], dtype=torch.float64)
    for m in range(h.shape[0]):
        for n in range(w.shape[1]):
            if kept[m, n]:
                out[m] += w[:, n].double() * h[m, n].double()
        if bias is not None:
            out[m] += bias.double()
    return out


def dumb_ffn(x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, keep: Tensor, act: str, b: list[Any]) -> Tensor:
    def rounded(t: Tensor) -> Tensor:
        return t.to(x.dtype).double()

    h = rounded(dumb_in(x, up, keep, b[1]))
    if gate is None:
        h = rounded(activation(h, act))
    else:
        h = rounded(rounded(activation(rounded(dumb_in(x, gate, keep, b[0])), act)) * h)
    return dumb_out(h.to(x.dtype), down, keep, b[2])


def make(m: int, d: int, f: int, g: int, dtype: torch.dtype, input_major: bool, density: float = 0.5) -> dict[str, Any]:
    down = (torch.randn(d, f) / f**0.5).to(dtype)
    return {
        "x": torch.randn(m, d).to(dtype),
        "gate": (torch.randn(f, d) / d**0.5).to(dtype),
        "up": (torch.randn(f, d) / d**0.5).to(dtype),
        "down": down.t().contiguous().t() if input_major else down,
        "keep": torch.rand(m, g) < density,
        "biases": [torch.randn(f).to(dtype), torch.randn(f).to(dtype), torch.randn(d).to(dtype)],
    }


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_ffn(rows: int, dtype: torch.dtype, isa: str) -> None:
    shapes = [(33, 35, 7), (70, 60, 5), (64, 96, 3), (17, 11, 1), (130, 22, 11)]
    for i, (d, f, g) in enumerate(shapes):
        t = make(rows, d, f, g, dtype, input_major=(rows + i) % 2 == 0)
        gate = None if i == 3 else t["gate"]
        biases = [None] * 3 if i == 2 else t["biases"]
        if gate is None:
            biases = [None, *biases[1:]]
        act = ACTS[(i + rows) % 4]
        got = cpu.routed_ffn(t["x"], gate, t["up"], t["down"], t["keep"], act, *biases, isa=isa)
        close(got, dumb_ffn(t["x"], gate, t["up"], t["down"], t["keep"], act, biases), dtype)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_projections(rows: int, dtype: torch.dtype, isa: str) -> None:
    for i, (d, n, g) in enumerate([(33, 35, 7), (64, 60, 4), (129, 12, 3)]):
        t = make(rows, d, n, g, dtype, input_major=(rows + i) % 2 == 0)
        bias_in, bias_out = (t["biases"][1], t["biases"][2]) if i else (None, None)
        close(cpu.routed_in(t["x"], t["up"], t["keep"], bias_in, isa=isa),
              dumb_in(t["x"], t["up"], t["keep"], bias_in), dtype)  # fmt: skip
        h = torch.randn(rows, n).to(dtype)
        h[~t["keep"].repeat_interleave(n // g, 1)] = math.nan  # dropped inputs may hold anything
        want = dumb_out(h, t["down"], t["keep"], bias_out)
        close(cpu.routed_out(h, t["down"], t["keep"], bias_out, isa=isa), want, dtype)
        everything = torch.ones(rows, 1, dtype=torch.bool)
        close(cpu.linear(t["x"], t["up"], bias_in, isa=isa), dumb_in(t["x"], t["up"], everything, bias_in), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 9, 70])
@pytest.mark.parametrize("density", [0.0, 1.0], ids=["nothing", "everything"])
def test_nothing_everything_and_empty(rows: int, density: float, dtype: torch.dtype) -> None:
    t = make(rows, 48, 60, 5, dtype, input_major=True, density=density)
    got = cpu.routed_ffn(t["x"], t["gate"], t["up"], t["down"], t["keep"], "silu", *t["biases"])
    close(got, dumb_ffn(t["x"], t["gate"], t["up"], t["down"], t["keep"], "silu", t["biases"]), dtype)
    close(cpu.routed_in(t["x"], t["up"], t["keep"]), dumb_in(t["x"], t["up"], t["keep"], None), dtype)
    h = torch.randn(rows, 60).to(dtype)
    close(cpu.routed_out(h, t["down"], t["keep"]), dumb_out(h, t["down"], t["keep"], None), dtype)


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_groups_that_nobody_keeps_are_not_read(rows: int) -> None:
    t = make(rows, 64, 96, 6, torch.bfloat16, input_major=True)
    t["keep"][:, [1, 4]] = False
    t["keep"][:, [0, 2, 3, 5]] = True
    for channels in (slice(16, 32), slice(64, 80)):
        for w in (t["gate"][channels], t["up"][channels], t["down"][:, channels]):
            w.fill_(math.nan)
    got = cpu.routed_ffn(t["x"], t["gate"], t["up"], t["down"], t["keep"], "silu")
    assert torch.isfinite(got).all()


def masks_of(kind: str, rows: int, groups: int) -> Tensor:
    """How masks come: each row its own choice; learned ones, of which groups that all or no rows keep are a part; all
    rows alike; all kept; nothing kept."""
    keep = torch.rand(rows, groups) < 0.5
    if kind == "learned":
        keep = torch.rand(rows, groups) < torch.rand(groups) ** 2
        keep[:, :2], keep[:, 2:4] = True, False
    return {"shared": keep[:1].expand(rows, -1).contiguous(), "all": keep | True, "none": keep & False}.get(kind, keep)


@pytest.mark.parametrize("kind", ["random", "learned", "shared", "all", "none"])
@pytest.mark.parametrize("size, groups, outputs", [(64, 9, 70), (3, 21, 130), (130, 17, 64), (1, 40, 5)])
@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_sorted_by_what_they_keep_give_what_each_row_gives_alone(
    kind: str, size: int, groups: int, outputs: int, isa: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    w = torch.randn(groups * size, outputs).to(dtype).t()
    for rows in (33, 200):
        x, keep = torch.randn(rows, groups * size).to(dtype), masks_of(kind, rows, groups)
        x.masked_fill_(~keep.repeat_interleave(size, 1), math.nan)  # what is dropped is not used
        got = cpu.routed_out(x, w, keep, isa=isa)
        some = torch.randperm(rows)[:40]  # other rows beside it, another number of them: the same bits
        assert torch.equal(got[some], cpu.routed_out(x[some], w, keep[some], isa=isa))
        close(got, x.nan_to_num(nan=0.0).double() @ w.double().t(), dtype)
        assert torch.equal(got, cpu.routed_out(x, w.contiguous(), keep, isa=isa))  # packed from the other layout


@pytest.mark.parametrize("kind", ["random", "learned", "shared", "all"])
@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_rows_give_the_bits_of_each_alone(kind: str, isa: str, dtype: torch.dtype) -> None:
    # 12 and more rows of a group are summed up in larger tiles, long rows multiplied by chunks
    groups, size, long = 9, 13, 4099
    w, w_in = torch.randn(groups * size, 70).to(dtype).t(), torch.randn(18, long).to(dtype)
    for rows in (11, 14, 31, 32):
        x, keep = torch.randn(rows, groups * size).to(dtype), masks_of(kind, rows, groups)
        wide = torch.randn(rows, long).to(dtype)
        one = [slice(i, i + 1) for i in range(rows)]
        alone = [cpu.routed_out(x[i], w, keep[i], isa=isa) for i in one]
        assert torch.equal(cpu.routed_out(x, w, keep, isa=isa), torch.cat(alone))
        alone = [cpu.routed_in(wide[i], w_in, keep[i], isa=isa) for i in one]
        got = cpu.routed_in(wide, w_in, keep, isa=isa)
        assert torch.equal(got, torch.cat(alone))
        kept = keep.repeat_interleave(2, 1)
        close(got, torch.where(kept, wide.double() @ w_in.double().t(), 0.0), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [5, 32, 100])
def test_a_row_does_not_depend_on_its_batch_mates(rows: int, dtype: torch.dtype) -> None:
    t = make(rows, 72, 90, 5, dtype, input_major=True)
    other = make(rows, 72, 90, 5, dtype, input_major=True)
    last = rows - 1
    x, keep = other["x"].clone(), other["keep"].clone()
    x[last], keep[last] = t["x"][0], t["keep"][0]
    weights = (t["gate"], t["up"], t["down"])
    first = cpu.routed_ffn(t["x"], *weights, t["keep"], "silu")
    second = cpu.routed_ffn(x, *weights, keep, "silu")
    assert torch.equal(first[0], second[last])
    if rows <= cpu.few_rows():
        assert torch.equal(first[0], cpu.routed_ffn(t["x"][:1], *weights, t["keep"][:1], "silu")[0])
    q, k = torch.randn(2, rows, 4, 16).to(dtype), torch.randn(2, rows, 2, 16).to(dtype)
    kept = torch.rand(2, rows, 2) < 0.5
    both = cpu.routed_attention(q, k, k, kept)
    assert torch.equal(both[1:], cpu.routed_attention(q[1:], k[1:], k[1:], kept[1:]))


@pytest.mark.parametrize("rows", [3, 100])
def test_the_number_of_threads_changes_nothing(rows: int) -> None:
    t = make(rows, 72, 90, 5, torch.bfloat16, input_major=True)
    q = torch.randn(1, rows, 4, 32).bfloat16()
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert native.library().widellm_team(threads) in (1, threads)
            ffn = cpu.routed_ffn(t["x"], t["gate"], t["up"], t["down"], t["keep"], "silu")
            results.append((ffn, cpu.routed_attention(q, q, q, torch.ones(1, rows, 4, dtype=torch.bool))))
    finally:
        torch.set_num_threads(before)
    for ffn, attention in results[1:]:
        assert torch.equal(ffn, results[0][0]) and torch.equal(attention, results[0][1])


@pytest.mark.parametrize("size", [24, 130])
@pytest.mark.parametrize("rows", [1, 3, 17, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_by_section_and_by_column_have_the_same_bits(dtype: torch.dtype, rows: int, size: int) -> None:
    # 17 rows of 300 sums are near enough for sections, 32 are not; many threads share out columns again
    t = make(rows, 300, 40 * size, 40, dtype, input_major=True)
    h = torch.randn(rows, 40 * size).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = cpu.routed_out(h, t["down"], t["keep"], t["biases"][2])
        for row in range(rows):
            alone = cpu.routed_out(h[row : row + 1], t["down"], t["keep"][row : row + 1], t["biases"][2])
            assert torch.equal(alone[0], want[row])
        for threads in (2, 3, 16):
            torch.set_num_threads(threads)
            assert torch.equal(cpu.routed_out(h, t["down"], t["keep"], t["biases"][2]), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 20, 50])
@pytest.mark.parametrize("act", [None, "silu"])
def test_router_inside_the_ffn(rows: int, act: str | None) -> None:
    t = make(rows, 48, 60, 5, torch.bfloat16, input_major=True)
    router = cpu.Router(torch.randn(6, 48), torch.randn(5, 6), torch.randn(5), 0.3, act)
    got, keep = cpu.self_routed_ffn(t["x"], t["gate"], t["up"], t["down"], router, "silu")
    hidden = t["x"].double() @ router.down.double().t()
    if act:
        hidden = activation(hidden, act)
    assert router.bias is not None
    logits = hidden @ router.up.double().t() + router.bias.double()
    sure = (logits - 0.3).abs() > 1e-4
    assert torch.equal(keep[sure], (logits > 0.3)[sure])
    assert torch.equal(got, cpu.routed_ffn(t["x"], t["gate"], t["up"], t["down"], keep, "silu"))


def test_non_contiguous_inputs() -> None:
    t = make(6, 32, 40, 5, torch.float32, input_major=False)
    x = torch.randn(32, 6).t()  # columns of a transposed tensor
    wide = torch.randn(6, 64)[:, 8:40]  # rows apart
    keep = torch.zeros(5, 6, dtype=torch.bool).bernoulli_().t()
    up = torch.randn(40, 64)[:, :32]
    for x_view in (x, wide):
        close(cpu.routed_in(x_view, up, keep), dumb_in(x_view, up, keep, None), torch.float32)
    shared = t["keep"][:1].expand(6, 5)
    close(cpu.routed_in(x, up, shared), dumb_in(x, up, shared, None), torch.float32)


def test_bad_arguments_are_named() -> None:
    t = make(3, 32, 40, 5, torch.float32, input_major=False)
    x, gate, up, down, keep = (t[name] for name in ("x", "gate", "up", "down", "keep"))
    cases = [
        (ValueError, "x must be", (x[:, :31], gate, up, down, keep, "silu")),
        (ValueError, "x must be", (x.half(), gate, up, down, keep, "silu")),
        (ValueError, "w_gate must be", (x, gate[:39], up, down, keep, "silu")),
        (ValueError, "w_up must be", (x.bfloat16(), None, up, down, keep, "silu")),
        (ValueError, "w_down must be", (x, gate, up, down[:, :39], keep, "silu")),
        (ValueError, "at least one channel", (x, gate[:0], up[:0], down[:, :0], keep, "silu")),
        (ValueError, "keep must be", (x, gate, up, down, keep[:2], "silu")),
        (ValueError, "keep must be", (x, gate, up, down, keep.int(), "silu")),
        (ValueError, "keep must be", (x, gate, up, down, torch.ones(3, 7, dtype=torch.bool), "silu")),
        (ValueError, "act must be", (x, gate, up, down, keep, "tanh")),
        (ValueError, "b_gate is given", (x, None, up, down, keep, "silu", torch.zeros(40))),
        (ValueError, "b_down must be", (x, gate, up, down, keep, "silu", None, None, torch.zeros(31))),
        (BackendError, "w_up contiguous", (x, gate, torch.randn(32, 40).t(), down, keep, "silu")),
        (BackendError, "w_down contiguous", (x, gate, up, torch.randn(32, 80)[:, ::2], keep, "silu")),
    ]
    for error, message, arguments in cases:
        with pytest.raises(error, match=message):
            cpu.routed_ffn(*arguments)
    with pytest.raises(BackendError, match="neon.*known"):
        cpu.routed_in(x, up, keep, isa="neon")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(0, 40),
    d=st.integers(1, 70),
    size=st.integers(1, 40),
    groups=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(LEVELS or ["none"]),
    input_major=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fuzz(
    rows: int, d: int, size: int, groups: int, dtype: torch.dtype, isa: str, input_major: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    t = make(rows, d, size * groups, groups, dtype, input_major, density=seed / 99)
    act = ACTS[seed % 4]
    got = cpu.routed_ffn(t["x"], t["gate"], t["up"], t["down"], t["keep"], act, *t["biases"], isa=isa)
    close(got, dumb_ffn(t["x"], t["gate"], t["up"], t["down"], t["keep"], act, t["biases"]), dtype)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("act", ACTS)
def test_nan_is_passed_on_and_stays_in_its_row(rows: int, act: str) -> None:
    t = make(rows, 48, 60, 5, torch.bfloat16, input_major=True, density=1.0)
    t["x"][1, 7] = math.nan
    got = cpu.routed_ffn(t["x"], t["gate"], t["up"], t["down"], t["keep"], act)
    assert got[1].isnan().all() and not got[[i for i in range(rows) if i != 1]].isnan().any()
    q = torch.randn(1, rows, 2, 8)
    k = q.clone()
    q[0, 1, 0, 3] = math.nan
    got = cpu.routed_attention(q, k, k, torch.ones(1, rows, 2, dtype=torch.bool))
    assert got[0, 1, 0].isnan().all() and not got[0, :, 1].isnan().any() and not got[0, 2:].isnan().any()
