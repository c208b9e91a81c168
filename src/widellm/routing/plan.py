"""From a keep mask to what a kernel walks: row ids per group."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_by_group(keep: Tensor) -> tuple[Tensor, ...]:
    """For each group, int64 ids of the rows that keep it, ascending.

    keep: bool [M, G]. One pass and one read of the counts for all groups (a single synchronisation on a GPU).
    """
    groups, rows = keep.t().nonzero(as_tuple=True)
    counts = torch.bincount(groups, minlength=keep.shape[1])
    return torch.split(rows, counts.tolist())
