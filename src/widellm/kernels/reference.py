"""The dumbest correct loops: one row, one group at a time, float32 sums. Every other backend is tested against these.

Shapes: M rows, D hidden size, F channels (N: outputs of a projection), G groups of S = F / G consecutive channels.
`keep` is bool [M, G], True = compute.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def activate(x: Tensor, act: str) -> Tensor:
    """The activation named `act`: silu, gelu, gelu_tanh or relu."""
    if act == "silu":
        return torch.nn.functional.silu(x)
    if act == "gelu":
        return torch.nn.functional.gelu(x)
    if act == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    if act == "relu":
        return torch.relu(x)
    raise ValueError(f"activation must be silu, gelu, gelu_tanh or relu, got {act!r}")


def routed_ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    keep: Tensor,
    act: str,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
) -> Tensor:
    """y = sum over kept groups g of W_down[:, g] (act(W_gate[g] x + b_gate[g]) * (W_up[g] x + b_up[g])) + b_down."""
    m, groups = keep.shape
    size = w_up.shape[0] // groups
    out = torch.zeros(m, w_down.shape[0], dtype=torch.float32, device=x.device)
    for row in range(m):
        xr = x[row].float()
        for group in range(groups):
            if not keep[row, group]:
                continue
            cut = slice(group * size, (group + 1) * size)
            up = w_up[cut].float() @ xr
            if b_up is not None:
                up = up + b_up[cut].float()
            if w_gate is None:
                h = activate(up, act)
            else:
                gate = w_gate[cut].float() @ xr
                if b_gate is not None:
                    gate = gate + b_gate[cut].float()
                h = activate(gate, act) * up
            out[row] += w_down[:, cut].float() @ h
        if b_down is not None:
            out[row] += b_down.float()
    return out.to(x.dtype)


def routed_in(x: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None = None) -> Tensor:
    """y[:, g] = W[g] x + bias[g] for kept groups g of the outputs, 0 for the others."""
    m, groups = keep.shape
    size = w.shape[0] // groups
    out = torch.zeros(m, w.shape[0], dtype=torch.float32, device=x.device)
    for row in range(m):
        for group in range(groups):
            if keep[row, group]:
                cut = slice(group * size, (group + 1) * size)
                out[row, cut] = w[cut].float() @ x[row].float()
                if bias is not None:
                    out[row, cut] += bias[cut].float()
    return out.to(x.dtype)


def routed_out(h: Tensor, w: Tensor, keep: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = sum over kept groups g of the inputs of W[:, g] h[g], + bias. What h holds in dropped groups is not read."""
    m, groups = keep.shape
    size = w.shape[1] // groups
    out = torch.zeros(m, w.shape[0], dtype=torch.float32, device=h.device)
    for row in range(m):
        for group in range(groups):
            if keep[row, group]:
                cut = slice(group * size, (group + 1) * size)
                out[row] += w[:, cut].float() @ h[row, cut].float()
        if bias is not None:
            out[row] += bias.float()
    return out.to(h.dtype)


def routed_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Softmax attention of each kept (row, head); 0 where the head's group is dropped.

    q [B, Tq, H, d], k and v [B, Tk, K, d], keep bool [B, Tq, G]; mask None = causal, the last query sees every key;
    or bool (True = may look) or additive float, broadcastable to [B, 1, Tq, Tk]. Returns [B, Tq, H, d].
    """
    batch, tq, heads, dim = q.shape
    tk, kv_heads = k.shape[1], k.shape[2]
    per_group, per_kv = heads // keep.shape[2], heads // kv_heads
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    if mask is not None:
        mask = mask.expand(batch, 1, tq, tk)
    out = torch.zeros(batch, tq, heads, v.shape[3], dtype=torch.float32, device=q.device)
    for b in range(batch):
        for t in range(tq):
            for head in range(heads):
                if not keep[b, t, head // per_group]:
                    continue
                scores = (k[b, :, head // per_kv].float() @ q[b, t, head].float()) * scale
                if mask is None:
                    scores[t + tk - tq + 1 :] = -math.inf
                elif mask.dtype == torch.bool:
                    scores = scores.masked_fill(~mask[b, 0, t], -math.inf)
                else:
                    scores = scores + mask[b, 0, t].float()
                if bool((scores == -math.inf).all()):
                    continue  # nothing to look at (a padding row): 0, not NaN
                out[b, t, head] = torch.softmax(scores, 0) @ v[b, :, head // per_kv].float()
    return out.to(q.dtype)
