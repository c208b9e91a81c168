"""Every torch backend of every op against the reference loops, and the reference against a dense layer."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from widellm.errors import BackendError
from widellm.kernels import cpu, grouped, masked, reference, registry

MASKS = ("random", "none", "all", "one_group", "one_row")
BACKENDS = {"masked": masked, "grouped": grouped, "cpu": cpu}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def make_keep(kind: str, m: int, g: int) -> torch.Tensor:
    keep = torch.zeros(m, g, dtype=torch.bool)
    if kind == "random":
        keep = torch.rand(m, g) < 0.5
    elif kind == "all":
        keep[:] = True
    elif kind == "one_group":
        keep[:, g // 2] = True
    elif kind == "one_row" and m:
        keep[m // 2] = True
    return keep


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype
    assert torch.isfinite(a).all()
    scale = b.float().abs().max().item() if b.numel() else 1.0
    assert (a.float() - b.float()).abs().max().item() <= TOLERANCE[a.dtype] * max(scale, 1.0) if b.numel() else True


def skip_unless_it_runs(name: str, dtype: torch.dtype = torch.float32) -> None:
    usable, reason = registry.backends()[name]
    if not usable:
        pytest.skip(f"backend {name}: {reason}")
    if name == "cpu" and dtype == torch.float16:
        pytest.skip("the native library has float32 and bfloat16")


@pytest.mark.requirement("R28")
@pytest.mark.requirement("R45")
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("m", [0, 1, 2, 3, 7, 17, 64, 129])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ffn_and_projections_match_the_loop(name: str, m: int, kind: str, dtype: torch.dtype) -> None:
    skip_unless_it_runs(name, dtype)
    d, g, s = 20, 5, 12  # G is no power of two, D is no multiple of a vector
    keep = make_keep(kind, m, g)
    x = torch.randn(m, d).to(dtype)
    gate, up, down = (torch.randn(a, b).mul(0.3).to(dtype) for a, b in ((g * s, d), (g * s, d), (d, g * s)))
    b_gate, b_up, b_down = (torch.randn(n).mul(0.3).to(dtype) for n in (g * s, g * s, d))
    for args in ((gate, up, down, keep, "silu"), (None, up, down, keep, "relu")):
        close(BACKENDS[name].routed_ffn(x, *args), reference.routed_ffn(x, *args))
        biases = (b_gate if args[0] is not None else None, b_up, b_down)
        close(BACKENDS[name].routed_ffn(x, *args, *biases), reference.routed_ffn(x, *args, *biases))
    close(BACKENDS[name].routed_in(x, up, keep, b_up), reference.routed_in(x, up, keep, b_up))
    h = torch.randn(m, g * s).to(dtype)
    h.view(m, g, s)[~keep] = float("nan")  # what was dropped is never read
    close(BACKENDS[name].routed_out(h, down, keep, b_down), reference.routed_out(h, down, keep, b_down))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu"])
def test_reference_with_everything_kept_is_the_dense_ffn(act: str) -> None:
    x, gate, up, down = torch.randn(5, 8), torch.randn(12, 8), torch.randn(12, 8), torch.randn(8, 12)
    dense = linear(reference.activate(linear(x, gate), act) * linear(x, up), down)
    got = reference.routed_ffn(x, gate, up, down, torch.ones(5, 3, dtype=torch.bool), act)
    torch.testing.assert_close(got, dense, atol=1e-4, rtol=1e-4)


def test_reference_drops_a_group_like_zeroed_channels() -> None:
    x, gate, up, down = torch.randn(4, 8), torch.randn(12, 8), torch.randn(12, 8), torch.randn(8, 12)
    keep = torch.tensor([[1, 0, 1]] * 4, dtype=torch.bool)
    h = silu(linear(x, gate)) * linear(x, up)
    h[:, 4:8] = 0
    got = reference.routed_ffn(x, gate, up, down, keep, "silu")
    torch.testing.assert_close(got, linear(h, down), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("heads", "kv", "groups"), [(4, 4, 4), (6, 2, 3), (6, 2, 2), (8, 1, 2), (9, 3, 9)])
@pytest.mark.parametrize(("tq", "tk"), [(1, 1), (1, 9), (5, 5), (3, 8)])
@pytest.mark.parametrize("masking", ["causal", "bool", "additive"])
@pytest.mark.parametrize("name", ["masked", "cpu"])
def test_attention_matches_the_loop(
    name: str, heads: int, kv: int, groups: int, tq: int, tk: int, masking: str
) -> None:
    skip_unless_it_runs(name)
    q, k, v = torch.randn(2, tq, heads, 8), torch.randn(2, tk, kv, 8), torch.randn(2, tk, kv, 8)
    keep = torch.rand(2, tq, groups) < 0.6
    mask = None
    if masking != "causal":
        mask = torch.ones(tq, tk, dtype=torch.bool).tril(tk - tq).expand(2, 1, tq, tk).clone()
        mask[1, :, :, 0] = False  # left padding: with tk = 1 the whole row looks at nothing
        if masking == "additive":
            mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    close(BACKENDS[name].routed_attention(q, k, v, keep, mask), reference.routed_attention(q, k, v, keep, mask))


def test_reference_attention_with_everything_kept_is_sdpa() -> None:
    q, k, v = (torch.randn(2, 6, 4, 8) for _ in range(3))
    dense = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
    got = reference.routed_attention(q, k, v, torch.ones(2, 6, 4, dtype=torch.bool))
    torch.testing.assert_close(got, dense, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "masked", "grouped", "reference"])
def test_the_public_op_runs_every_backend(backend: str) -> None:
    x, up, down = torch.randn(6, 8), torch.randn(12, 8), torch.randn(8, 12)
    keep = torch.rand(6, 3) < 0.5
    got = registry.routed_ffn(x, None, up, down, keep, "gelu", backend=backend)
    close(got, reference.routed_ffn(x, None, up, down, keep, "gelu"))


def test_an_unknown_backend_raises_and_lists_what_runs() -> None:
    with pytest.raises(BackendError, match="'fast' is not known; usable: auto, .*masked"):
        registry.check_backend("fast")
    with pytest.raises(BackendError, match="usable"):
        registry.routed_in(torch.randn(2, 4), torch.randn(6, 4), torch.ones(2, 3, dtype=torch.bool), backend="fast")


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", ["groups", "rows", "flat", "deep", "empty", "scalar", "dtype"])
def test_a_mask_that_does_not_fit_raises(bad: str, kind: torch.dtype, rows: int) -> None:
    shapes = {"groups": (rows, 5), "rows": (rows + 1, 3), "flat": (rows,), "deep": (rows, 2, 3), "empty": (rows, 0)}
    shape = () if bad == "scalar" else shapes.get(bad, (rows, 3))
    keep = torch.ones(shape, dtype=torch.int8 if bad == "dtype" else torch.bool)
    x, h = torch.randn(rows, 4).to(kind), torch.randn(rows, 6).to(kind)
    w = torch.randn(6, 4).to(kind)
    with pytest.raises(ValueError, match="keep must be"):
        registry.routed_in(x, w, keep)
    with pytest.raises(ValueError, match="keep must be"):
        registry.routed_out(h, w.t(), keep)
    with pytest.raises(ValueError, match="keep must be"):
        registry.routed_ffn(x, w, w, w.t(), keep, "silu")
    q = torch.randn(1, rows, 6, 4).to(kind)
    with pytest.raises(ValueError, match="keep must be"):
        registry.routed_attention(q, q, q, keep if keep.ndim == 0 else keep[None])


def test_gradients_flow_through_the_public_op() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    w, keep = torch.randn(6, 4), torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    registry.routed_in(x, w, keep).sum().backward()
    per_row = (keep.float().repeat_interleave(2, 1)) @ w
    torch.testing.assert_close(x.grad, per_row)


def test_ops_compile_without_graph_breaks() -> None:
    def step(x: torch.Tensor, w: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return registry.routed_in(x, w, keep, backend="masked") * 2

    x, w, keep = torch.randn(3, 4), torch.randn(6, 4), torch.rand(3, 3) < 0.5
    with torch.no_grad():
        compiled = torch.compile(step, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x, w, keep), step(x, w, keep))


@pytest.mark.requirement("R30")
@pytest.mark.parametrize("name", ["masked", "grouped", "cpu"])
@pytest.mark.parametrize("m", [5, 40])
def test_a_row_does_not_depend_on_its_batch_mates(name: str, m: int) -> None:
    """Masks of a row never do; with the native kernels its numbers do not either, to the bit."""
    skip_unless_it_runs(name)
    gate, up, down = torch.randn(48, 20), torch.randn(48, 20), torch.randn(20, 48)
    x, keep = torch.randn(m, 20), torch.rand(m, 6) < 0.5
    full = BACKENDS[name].routed_ffn(x, gate, up, down, keep, "silu")
    other, other_keep = torch.randn(m, 20), torch.rand(m, 6) < 0.5
    other[3], other_keep[3] = x[3], keep[3]
    mixed = BACKENDS[name].routed_ffn(other, gate, up, down, other_keep, "silu")
    if name == "cpu":
        assert torch.equal(full[3], mixed[3])
    else:
        close(full[3], mixed[3])


@pytest.mark.requirement("R38")
def test_auto_takes_a_layout_that_the_native_library_does_not_and_a_named_backend_raises() -> None:
    skip_unless_it_runs("cpu")
    x, keep = torch.randn(3, 8), torch.rand(3, 3) < 0.5
    w = torch.randn(12, 16)[:, ::2]  # rows with gaps between their numbers
    close(registry.routed_in(x, w, keep), reference.routed_in(x, w, keep))
    with pytest.raises(BackendError, match="contiguous"):
        registry.routed_in(x, w, keep, backend="cpu")
