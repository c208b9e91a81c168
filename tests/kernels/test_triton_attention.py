"""The Triton attention against a loop over sequences, tokens and heads in float64; interpreter or GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from widellm.kernels import gpu

AVAILABLE, WHY = gpu.availability()
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=WHY)
if AVAILABLE:
    from widellm.kernels.triton_attention import routed_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
SHAPES = [  # B, Tq, Tk, H, K, d, G
    (2, 1, 1, 2, 1, 8, 2),
    (2, 1, 5, 4, 2, 16, 2),
    (1, 1, 300, 6, 3, 33, 6),
    (3, 5, 70, 6, 6, 24, 3),
    (2, 8, 90, 8, 2, 20, 4),
    (2, 20, 20, 4, 1, 64, 4),
    (1, 70, 130, 8, 2, 32, 4),
    (1, 129, 129, 3, 3, 17, 3),
    (1, 90, 90, 9, 3, 64, 9),
    (20, 1, 6, 2, 2, 8, 1),
]


@pytest.fixture(autouse=True)
def _hostile_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is allocated starts as NaN or 77."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return made.fill_(math.nan if made.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", poisoned)
    yield


def dumb(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, mask: Tensor | None, causal: bool, window: int, start: list[int],
    lengths: list[int],
) -> Tensor:  # fmt: skip
    batch, tq, heads, d = q.shape
    tk, kv_heads = k.shape[1:3]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(batch):
        for t in range(tq):
            here = lengths[b] - tq + t
            seen = [
                j
                for j in range(min(tk, lengths[b]))
                if j >= start[b] and not (causal and j > here) and not (window and j <= here - window)
            ]
            for h in range(heads):
                if not keep[b, t, h // (heads // keep.shape[2])] or not seen:
                    continue
                kv = h // (heads // kv_heads)
                scores = k[b, seen, kv].double() @ q[b, t, h].double() * d**-0.5
                if mask is not None:
                    row = mask.expand(batch, 1, tq, tk)[b, 0, t, seen]
                    scores += torch.where(row, 0.0, -math.inf).double() if row.dtype == torch.bool else row.double()
                if scores.max() > -math.inf:
                    out[b, t, h] = torch.softmax(scores, 0) @ v[b, seen, kv].double()
    return out


def close(got: Tensor, want: Tensor) -> None:
    assert not torch.isnan(got).any()
    limit = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[got.dtype]
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=limit)


def on(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in tensors]


@pytest.mark.requirement("R17")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape: tuple[int, ...]) -> None:
    dtype = DTYPES[SHAPES.index(shape) % len(DTYPES)]
    batch, tq, tk, heads, kv_heads, d, groups = shape
    q = torch.randn(batch, tq, heads, d).to(dtype)
    cache = torch.randn(2, batch, kv_heads, tk + 3, d).to(DEVICE, dtype)  # as a static cache holds it, read in place
    k, v = cache[0, :, :, :tk].transpose(1, 2), cache[1, :, :, :tk].transpose(1, 2)
    keep = torch.rand(batch, tq, groups) < 0.6
    q, keep = on(q, keep)
    none, full = [0] * batch, [tk] * batch
    host = [t.cpu() for t in (q, k, v, keep)]
    close(routed_attention(q, k, v, keep), dumb(*host, None, True, 0, none, full))
    variants: list[tuple[Tensor | None, bool, int]] = [
        (torch.rand(batch, 1, tq, tk) < 0.7, False, 0),
        (torch.randn(1, 1, tq, tk).to(dtype), False, 0),
        (torch.randn(batch, 1, 1, tk), True, 0),
        (None, True, 5),
        (None, False, 0),
    ]
    mask, causal, window = variants[(tq + heads) % 5]
    start = [(3 * b) % tk for b in range(batch)]
    lengths = [max(1, tk - 2 * b) for b in range(batch)] if heads % 2 else full
    got = routed_attention(
        q, k, v, keep, None if mask is None else mask.to(DEVICE), causal=causal, window=window,
        start=torch.tensor(start).to(DEVICE), lengths=torch.tensor(lengths).to(DEVICE),
    )  # fmt: skip
    close(got, dumb(*host, mask, causal, window, start, lengths))


@pytest.mark.parametrize("tq", [1, 3, 40])
def test_pages_in_any_order_are_the_cache(tq: int) -> None:
    batch, heads, kv_heads, d, page, pages = 3, 4, 2, 16, 16, 7
    lengths = torch.tensor([50, 41, 112])
    pool = torch.randn(2, 30, page, kv_heads, d)
    table = torch.randperm(30)[: batch * pages].view(batch, pages).int()
    q, keep = torch.randn(batch, tq, heads, d), torch.rand(batch, tq, 4) < 0.5
    got = routed_attention(*on(q, pool[0], pool[1], keep), table=table.to(DEVICE), lengths=lengths.to(DEVICE))
    k, v = (t[table.long()].reshape(batch, pages * page, kv_heads, d) for t in pool)
    close(got, dumb(q, k, v, keep, None, True, 0, [0] * batch, lengths.tolist()))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 4])
def test_packed_sequences_do_not_see_each_other(causal: bool, window: int) -> None:
    edges = [0, 3, 4, 40, 90]
    q, k = torch.randn(1, 90, 4, 16), torch.randn(1, 90, 2, 16)
    keep = torch.rand(1, 90, 2) < 0.5
    got = routed_attention(
        *on(q, k, k, keep), causal=causal, window=window if causal else 0, sequences=torch.tensor(edges).to(DEVICE)
    )
    for first, last in zip(edges, edges[1:], strict=False):
        part = slice(first, last)
        want = dumb(
            q[:, part], k[:, part], k[:, part], keep[:, part], None, causal, window if causal else 0, [0],
            [last - first],
        )  # fmt: skip
        close(got[:, part], want)


def test_rows_that_see_nothing_and_heads_that_nobody_keeps() -> None:
    q, k = torch.randn(2, 40, 4, 16), torch.randn(2, 40, 2, 16)
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()
    mask[0, 0, :7] = False
    keep = torch.ones(2, 40, 2, dtype=torch.bool)
    got = routed_attention(*on(q, k, k, keep, mask))
    close(got, dumb(q, k, k, keep, mask, False, 0, [0, 0], [40, 40]))
    assert (got[0, :7] == 0).all()
    assert (routed_attention(*on(q, k, k, torch.zeros_like(keep))) == 0).all()
    for tokens in (1, 40):  # the cache of a KV head that nobody keeps is not read
        keep = torch.tensor([True, False]).expand(2, tokens, 2)
        bad = k.clone()
        bad[:, :, 1] = math.nan
        assert torch.isfinite(routed_attention(*on(q[:, -tokens:], bad, bad, keep))).all()


def test_empty() -> None:
    keep = torch.ones(1, 0, 2, dtype=torch.bool)
    k = torch.randn(1, 4, 2, 8)
    assert routed_attention(*on(torch.randn(1, 0, 4, 8), k, k, keep)).shape == (1, 0, 4, 8)
    keep = torch.ones(1, 1, 2, dtype=torch.bool)
    assert (routed_attention(*on(torch.randn(1, 1, 4, 8), k[:, :0], k[:, :0], keep)) == 0).all()


@pytest.mark.parametrize("rows", [3, 60])
def test_nan_stays_in_its_row(rows: int) -> None:
    q = torch.randn(1, rows, 2, 8)
    k = q.clone()
    q[0, 1, 0, 3] = math.nan
    got = routed_attention(*on(q, k, k, torch.ones(1, rows, 2, dtype=torch.bool)))
    assert got[0, 1, 0].isnan().all() and not got[0, :, 1].isnan().any() and not got[0, 2:].isnan().any()


def test_bad_arguments_are_named() -> None:
    q, k, keep = torch.randn(1, 2, 4, 8), torch.randn(1, 5, 2, 8), torch.ones(1, 2, 2, dtype=torch.bool)
    three = torch.randn(1, 5, 3, 8)
    for message, arguments in [
        ("k must be", (q, k[..., :7], k, keep)),
        ("v must be", (q, k, k[:, :4], keep)),
        ("k must be", (q, k.half(), k, keep)),
        ("keep must be", (q, k, k, keep[:, :1])),
        ("keep must be", (q, k, k, torch.ones(1, 2, 3, dtype=torch.bool))),
        ("mask must be", (q, k, k, keep, torch.zeros(1, 4, 2, 5))),
        ("mask must be", (q, k, k, keep, torch.zeros(1, 1, 2, 4))),
        ("mask must be", (q, k, k, keep, torch.zeros(1, 1, 2, 5, dtype=torch.int64))),
        ("KV heads", (q, three, three, keep)),
    ]:
        with pytest.raises(ValueError, match=message):
            routed_attention(*on(*arguments))
    with pytest.raises(ValueError, match="paged cache needs"):
        routed_attention(*on(q, k, k, keep), table=torch.zeros(1, 2, dtype=torch.int32).to(DEVICE))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 2),
    tq=st.integers(1, 30),
    past=st.integers(0, 80),
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    d=st.integers(1, 40),
    window=st.integers(0, 9),
)
def test_fuzz(batch: int, tq: int, past: int, kv_heads: int, shared: int, d: int, window: int) -> None:
    heads, tk = kv_heads * shared, tq + past
    q, k = torch.randn(batch, tq, heads, d), torch.randn(batch, tk, kv_heads, d)
    v, keep = torch.randn(batch, tk, kv_heads, d), torch.rand(batch, tq, heads) < 0.5
    start = [past // (b + 2) for b in range(batch)]
    got = routed_attention(*on(q, k, v, keep), window=window, start=torch.tensor(start).to(DEVICE))
    close(got, dumb(q, k, v, keep, None, True, window, start, [tk] * batch))
