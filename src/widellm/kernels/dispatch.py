"""Which backend `auto` takes for an op: the fastest by measurement, dense included. Time changes, results never do."""

from __future__ import annotations

from torch import Tensor

# Below this many rows a group's share of rows is too few to fill a GEMM: plain torch loses to dense.
GROUPED_MIN_ROWS = 128
# Above this density the gathers cost more than the skipped work saves.
GROUPED_MAX_DENSITY = 0.7


def choose(op: str, x: Tensor, keep: Tensor, width: int) -> str:
    """Name of the backend for `op` on x `[M, ...]` with keep `[M, G]` over `width` outputs or channels."""
    if op != "routed_ffn" or keep.shape[0] < GROUPED_MIN_ROWS:
        return "masked"
    return "grouped" if float(keep.float().mean()) < GROUPED_MAX_DENSITY else "masked"


def choose_attention(query: Tensor, key: Tensor) -> str:
    """Name of the backend for attention of query `[B,H,Tq,d]` over key `[B,K,Tk,d]`."""
    return "masked"
