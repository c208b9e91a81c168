"""int8 weights in the native kernels: the ops, the fused layer and a stack of them, against loops on what they mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_cpu_layer import D, K, bind, by_ops, routers, run, weights
from test_cpu_layer import d as dim
from test_cpu_ops import ACTS, close, dumb_ffn, dumb_in, dumb_out, make
from torch import Tensor

from widellm.errors import BackendError
from widellm.kernels import cpu, int8, native
from widellm.kernels.cpu import Int8
from widellm.kernels.fused_stack import FusedStack

AVAILABLE, WHY = cpu.availability()
pytestmark = [pytest.mark.skipif(not AVAILABLE, reason=WHY), pytest.mark.usefixtures("hostile_memory")]
LEVELS = cpu.levels() if AVAILABLE else []
DTYPES = [torch.float32, torch.bfloat16]


def quantised(w: Tensor) -> Int8:
    """-128 and 127 occur; the layout stays."""
    scale = w.float().abs().amax(1) / 120
    q = (w.float() / scale.unsqueeze(1)).round().clamp(-128, 127).to(torch.int8)
    q[0, :1], q[-1, -1:] = -128, 127
    return Int8(q, scale.contiguous())


def wide(w: Int8 | None) -> Any:
    return None if w is None else w.dense().double()


def case(rows: int, d: int, f: int, g: int, dtype: torch.dtype, input_major: bool, density: float = 0.5) -> Any:
    t = make(rows, d, f, g, dtype, input_major, density)
    for name in ("gate", "up", "down"):
        t[name] = quantised(t[name])
    return t


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 32, 33, 129])
def test_ops(rows: int, dtype: torch.dtype, isa: str) -> None:
    for i, (d, f, g) in enumerate([(33, 35, 7), (70, 60, 5), (64, 96, 3), (17, 11, 1), (130, 22, 11)]):
        t = case(rows, d, f, g, dtype, input_major=(rows + i) % 2 == 0)
        gate, b = (None, [None, *t["biases"][1:]]) if i == 3 else (t["gate"], t["biases"])
        act = ACTS[(i + rows) % 4]
        got = cpu.routed_ffn(t["x"], gate, t["up"], t["down"], t["keep"], act, *b, isa=isa)
        close(got, dumb_ffn(t["x"], wide(gate), wide(t["up"]), wide(t["down"]), t["keep"], act, b), dtype)
        got = cpu.routed_in(t["x"], t["up"], t["keep"], b[1], isa=isa)
        close(got, dumb_in(t["x"], wide(t["up"]), t["keep"], b[1]), dtype)
        h = torch.randn(rows, f).to(dtype)
        h[~t["keep"].repeat_interleave(f // g, 1)] = float("nan")  # dropped inputs may hold anything
        close(cpu.routed_out(h, t["down"], t["keep"], b[2], isa=isa),
              dumb_out(h, wide(t["down"]), t["keep"], b[2]), dtype)  # fmt: skip
        everything = torch.ones(rows, 1, dtype=torch.bool)
        close(cpu.linear(t["x"], t["up"], b[1], isa=isa), dumb_in(t["x"], wide(t["up"]), everything, b[1]), dtype)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_fuzz(data: st.DataObject) -> None:
    draw = data.draw
    rows, g, size = draw(st.integers(1, 70)), draw(st.integers(1, 6)), draw(st.integers(1, 40))
    width, dtype = draw(st.integers(1, 90)), draw(st.sampled_from(DTYPES))
    torch.manual_seed(draw(st.integers(0, 99)))
    t = case(rows, width, g * size, g, dtype, draw(st.booleans()), draw(st.sampled_from([0.0, 0.3, 1.0])))
    x = torch.full((rows, 2 * width), float("nan")).to(dtype)[:, ::2] if draw(st.booleans()) else t["x"]
    x.copy_(t["x"])
    act, isa = draw(st.sampled_from(ACTS)), draw(st.sampled_from(LEVELS))
    got = cpu.routed_ffn(x, t["gate"], t["up"], t["down"], t["keep"], act, *t["biases"], isa=isa)
    want = dumb_ffn(t["x"], wide(t["gate"]), wide(t["up"]), wide(t["down"]), t["keep"], act, t["biases"])
    close(got, want, dtype)


@pytest.mark.parametrize("rows", [16, 48])
def test_products_are_exact(rows: int) -> None:
    """Every int8 is a bf16, so nothing is lost but in the float32 sum."""
    q = torch.arange(-128, 128, dtype=torch.int8).repeat(3, 1)
    for begin in range(0, 257 - rows, 16):
        got = cpu.linear(torch.eye(256)[begin : begin + rows].bfloat16(), Int8(q, torch.ones(3)))
        assert torch.equal(got.float(), q[:, begin : begin + rows].t().float())


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("density", [0.5, 1.0])
def test_the_public_ops_are_the_reference(density: float, rows: int) -> None:
    t = case(rows, 48, 60, 5, torch.float32, input_major=True, density=density)
    x, gate, up, down, keep, b = (t[name] for name in ("x", "gate", "up", "down", "keep", "biases"))
    h = x @ up.dense().t()
    for call in (
        lambda backend: int8.routed_ffn(x, gate, up, down, keep, "silu", b[0], b[1], b[2], backend),
        lambda backend: int8.routed_ffn(x, None, up, down, keep, "relu", backend=backend),
        lambda backend: int8.routed_in(x, up, keep, b[1], backend),
        lambda backend: int8.routed_out(h, down, keep, b[2], backend),
    ):
        torch.testing.assert_close(call("cpu"), call("reference"), atol=2e-4, rtol=2e-4)
    if density == 1:  # the dense product
        torch.testing.assert_close(int8.routed_in(x, up, keep), h, atol=2e-4, rtol=2e-4)


def test_groups_that_nobody_keeps_are_not_read() -> None:
    t = case(3, 64, 96, 6, torch.bfloat16, input_major=True)
    t["keep"][:] = torch.tensor([True, False, True, True, False, True])
    for channels in (slice(16, 32), slice(64, 80)):
        t["gate"].scale[channels] = t["up"].scale[channels] = float("nan")
    assert torch.isfinite(cpu.routed_ffn(t["x"], t["gate"], t["up"], t["down"], t["keep"], "silu")).all()


def test_what_does_not_fit_is_refused() -> None:
    t = case(2, 32, 48, 3, torch.float32, input_major=True)
    x, gate, up, down, keep = (t[n] for n in ("x", "gate", "up", "down", "keep"))
    with pytest.raises(BackendError, match="all int8, or none"):
        cpu.routed_ffn(x, gate, up.dense(), down, keep, "silu")
    with pytest.raises(ValueError, match="int8"):
        cpu.linear(x, Int8(up.dense(), up.scale))
    with pytest.raises(ValueError, match="w's scale must be"):
        cpu.linear(x, Int8(up.q, up.scale[:-1]))
    with pytest.raises(ValueError, match="w's scale must be"):
        cpu.linear(x, Int8(up.q, up.scale.bfloat16()))
    with pytest.raises(BackendError, match="contiguous"):
        cpu.linear(x, Int8(up.q.t().contiguous().t(), up.scale))
    with pytest.raises(BackendError, match="cpu and reference, got 'masked'"):
        int8.routed_in(x, up, keep, backend="masked")
    assert int8.takes(x) and not int8.takes(x, "grouped") and not int8.takes(x.double())


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [(1, 1), (3, 1), (2, 4)], ids=str)
def test_layer_and_stack(rows: tuple[int, int], dtype: torch.dtype, isa: str) -> None:
    batch, tokens = rows
    x, past = torch.randn(batch, tokens, D).to(dtype), torch.randn(2, batch, K, 70, dim).to(dtype)
    angle = torch.rand(1, tokens, dim // 2).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    bound, caches, given = [], [], x
    for _ in range(2):
        w = weights(dtype, biases=batch != 3, qk_norm=tokens == 4, input_major=batch != 2)
        w, r = {n: quantised(t) if n.startswith("w_") else t for n, t in w.items()}, routers()
        bound.append(bind(w, r, isa))
        got = run(bound[-1], given, past, cos, sin)
        # the oracle is in float32 throughout, so a near-tied group may differ in bf16
        w32 = {n: t.dense() if isinstance(t, Int8) else t.float() for n, t in w.items()}
        want = by_ops(given.float(), w32, r, past.float(), cos.float(), sin.float())
        same = torch.equal(got[3], want[3]) and torch.equal(got[5], want[5])
        assert same or dtype == torch.bfloat16
        limit = 1e-4 if dtype == torch.float32 else 6e-2
        for i in (0, 1, 2, 4) if same else (1, 2):
            assert (got[i].float() - want[i]).abs().max() <= limit * want[i].abs().max()
        room = [torch.cat((p, torch.full((batch, K, tokens, dim), float("nan"), dtype=dtype)), 2) for p in past]
        caches.append([b.clone() for b in room])
        out, keep, ffn_keep = bound[-1].step(given, cos, sin, *room)
        assert torch.equal(out, got[4]) and torch.equal(keep, got[3]) and torch.equal(ffn_keep, got[5])
        given = out
    k, v = zip(*caches, strict=True)
    outs, _, _ = FusedStack(bound).step(x, cos, sin, k, v, 70 + tokens)
    assert torch.equal(outs[1], given)


def test_bits_do_not_depend_on_threads_or_batch_mates(monkeypatch: pytest.MonkeyPatch) -> None:
    t = case(7, 72, 90, 5, torch.bfloat16, input_major=True)

    def ffn(rows: slice) -> Tensor:
        return cpu.routed_ffn(t["x"][rows], t["gate"], t["up"], t["down"], t["keep"][rows], "silu", *t["biases"])

    every = ffn(slice(7))
    for m in range(7):
        assert torch.equal(ffn(slice(m, m + 1)), every[m : m + 1])
    monkeypatch.setattr(native, "GRAIN", 1 << 40)  # one thread
    assert torch.equal(ffn(slice(7)), every)
