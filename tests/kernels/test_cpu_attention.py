"""The native attention against a loop over sequences, tokens and heads in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from widellm.kernels import cpu

AVAILABLE, WHY = cpu.availability()
pytestmark = [pytest.mark.skipif(not AVAILABLE, reason=WHY), pytest.mark.usefixtures("hostile_memory")]
LEVELS = cpu.levels() if AVAILABLE else []
DTYPES = [torch.float32, torch.bfloat16]


def dumb_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, mask: Tensor | None, causal: bool, window: int, start: list[int]
) -> Tensor:
    batch, tq, heads, d = q.shape
    tk, kv_heads = k.shape[1:3]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(batch):
        for t in range(tq):
            here = tk - tq + t
            for h in range(heads):
                if not keep[b, t, h // (heads // keep.shape[2])]:
                    continue
                kv = h // (heads // kv_heads)
                scores = k[b, :, kv].double() @ q[b, t, h].double() * d**-0.5
                for j in range(tk):
                    if (causal and j > here) or (window and j <= here - window) or j < start[b]:
                        scores[j] = -math.inf
                if mask is not None:
                    row = mask.expand(batch, 1, tq, tk)[b, 0, t]
                    scores += torch.where(row, 0.0, -math.inf).double() if row.dtype == torch.bool else row.double()
                if scores.max() > -math.inf:
                    out[b, t, h] = torch.softmax(scores, 0) @ v[b, :, kv].double()
    return out


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and not torch.isnan(got).any()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5 if dtype == torch.float32 else 3e-2)


SHAPES = [  # B, Tq, Tk, H, K, d, G
    (2, 1, 1, 2, 1, 8, 2),
    (2, 1, 5, 4, 2, 16, 2),
    (1, 1, 300, 6, 3, 33, 6),
    (3, 5, 70, 6, 6, 24, 3),
    (2, 8, 90, 8, 2, 20, 4),
    (2, 9, 9, 4, 1, 64, 4),
    (1, 70, 130, 8, 2, 32, 4),
    (2, 129, 129, 3, 3, 17, 3),
    (1, 90, 90, 9, 3, 64, 9),
    (33, 1, 6, 2, 2, 8, 1),
]


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape: tuple[int, ...], dtype: torch.dtype, isa: str) -> None:
    batch, tq, tk, heads, kv_heads, d, groups = shape
    q = torch.randn(batch, tq, heads, d).to(dtype)
    cache = torch.randn(2, batch, kv_heads, tk + 3, d).to(dtype)  # as a static cache holds it, read in place
    k, v = cache[0, :, :, :tk].transpose(1, 2), cache[1, :, :, :tk].transpose(1, 2)
    keep = torch.rand(batch, tq, groups) < 0.6
    none = [0] * batch
    close(cpu.routed_attention(q, k, v, keep, isa=isa), dumb_attention(q, k, v, keep, None, True, 0, none), dtype)
    variants: list[tuple[Tensor | None, bool, int]] = [
        (torch.rand(batch, 1, tq, tk) < 0.7, False, 0),
        (torch.randn(1, 1, tq, tk).to(dtype), False, 0),
        (torch.randn(batch, 1, 1, tk), True, 0),
        (None, True, 5),
        (None, False, 0),
    ]
    mask, causal, window = variants[(tq + heads) % 5]
    start = [(3 * b) % tk for b in range(batch)]
    got = cpu.routed_attention(q, k, v, keep, mask, causal=causal, window=window, start=torch.tensor(start), isa=isa)
    close(got, dumb_attention(q, k, v, keep, mask, causal, window, start), dtype)


def test_rows_that_see_nothing_and_heads_that_nobody_keeps() -> None:
    q, k = torch.randn(2, 20, 4, 16), torch.randn(2, 20, 2, 16)
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    mask[0, 0, :7] = False
    keep = torch.ones(2, 20, 2, dtype=torch.bool)
    got = cpu.routed_attention(q, k, k, keep, mask)
    close(got, dumb_attention(q, k, k, keep, mask, False, 0, [0, 0]), torch.float32)
    assert (got[0, :7] == 0).all()
    assert (cpu.routed_attention(q, k, k, torch.zeros_like(keep)) == 0).all()
    for tokens in (1, 20):  # the cache of a KV head that nobody keeps is not read
        keep = torch.tensor([True, False]).expand(2, tokens, 2)
        bad = k.clone()
        bad[:, :, 1] = math.nan
        assert torch.isfinite(cpu.routed_attention(q[:, -tokens:], bad, bad, keep)).all()


def test_empty() -> None:
    keep = torch.ones(1, 0, 2, dtype=torch.bool)
    k = torch.randn(1, 4, 2, 8)
    assert cpu.routed_attention(torch.randn(1, 0, 4, 8), k, k, keep).shape == (1, 0, 4, 8)
    keep = torch.ones(1, 1, 2, dtype=torch.bool)
    assert (cpu.routed_attention(torch.randn(1, 1, 4, 8), k[:, :0], k[:, :0], keep) == 0).all()


def test_bad_arguments_are_named() -> None:
    q, k, keep = torch.randn(1, 2, 4, 8), torch.randn(1, 5, 2, 8), torch.ones(1, 2, 2, dtype=torch.bool)
    for message, arguments in [
        ("k must be", (q, k[..., :7], k, keep)),
        ("v must be", (q, k, k[:, :4], keep)),
        ("k must be", (q, k.bfloat16(), k, keep)),
        ("keep must be", (q, k, k, keep[:, :1])),
        ("keep must be", (q, k, k, torch.ones(1, 2, 3, dtype=torch.bool))),
        ("mask must be", (q, k, k, keep, torch.zeros(1, 4, 2, 5))),
        ("mask must be", (q, k, k, keep, torch.zeros(1, 1, 2, 4))),
        ("mask must be", (q, k, k, keep, torch.zeros(1, 1, 2, 5, dtype=torch.int64))),
        ("KV heads", (q, torch.randn(1, 5, 3, 8), torch.randn(1, 5, 3, 8), keep)),
    ]:
        with pytest.raises(ValueError, match=message):
            cpu.routed_attention(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start must be"):
        cpu.routed_attention(q, k, k, keep, start=torch.zeros(2, dtype=torch.int64))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 3),
    tq=st.integers(1, 12),
    past=st.integers(0, 80),
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    d=st.integers(1, 40),
    window=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(LEVELS or ["none"]),
)
def test_fuzz(
    batch: int, tq: int, past: int, kv_heads: int, shared: int, d: int, window: int, dtype: torch.dtype, isa: str
) -> None:
    heads, tk = kv_heads * shared, tq + past
    q, k = torch.randn(batch, tq, heads, d).to(dtype), torch.randn(batch, tk, kv_heads, d).to(dtype)
    v, keep = torch.randn(batch, tk, kv_heads, d).to(dtype), torch.rand(batch, tq, heads) < 0.5
    start = [past // (b + 2) for b in range(batch)]
    got = cpu.routed_attention(q, k, v, keep, window=window, start=torch.tensor(start), isa=isa)
    close(got, dumb_attention(q, k, v, keep, None, True, window, start), dtype)
