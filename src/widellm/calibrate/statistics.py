"""Sums over tokens from which the routers are solved: their size depends on the model, never on the text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from widellm.calibrate.stream import Sample

FLOOR = 1e-2
"""Added to an importance inside its logarithm, as a share of the mean: what is negligible is all alike."""
SENSITIVITY = 0.25
"""Exponent of a token's own squared gradient in its target: tokens on which much depends are worth more work."""
RIDGE = 1e-2
"""Added to the diagonal of the correlation matrix of the router's input."""
SAMPLED_ROWS = 2048
"""Rows kept of a sub-layer's input to set the routers' biases by."""
_SENSITIVITY_FLOOR = 1e-4


class Curvature:
    """How much an error of a sub-layer's output costs, and how large each FFN channel gets.

    fisher = E[g g^T] `[D, D]` and power = E[h^2] `[channels]`, both float32.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._fisher: Tensor | None = None
        self._power: Tensor | None = None

    def add(self, sample: Sample) -> None:
        """Count one window."""
        fisher, power = sample.g.t() @ sample.g, sample.h.square().sum(0)
        self._fisher = fisher if self._fisher is None else self._fisher.add_(fisher)
        self._power = power if self._power is None else self._power.add_(power)
        self.tokens += sample.g.shape[0]

    @property
    def fisher(self) -> Tensor:
        """E[g g^T], float32 [D, D]."""
        assert self._fisher is not None
        return self._fisher / self.tokens

    def channel_scores(self, w_out: Tensor) -> Tensor:
        """Expected cost of leaving out each channel alone: E[h_j^2] w_j^T F w_j, for w_out [D, channels]."""
        assert self._power is not None
        w = w_out.float()
        return self._power / self.tokens * (w * (self.fisher @ w)).sum(0)

    def group_forms(self, w_out: Tensor, groups: int) -> Tensor:
        """Q_g = W_g^T F W_g, float32 [G, S, S]: leaving out group g costs h_g^T Q_g h_g; w_out is [D, G*S]."""
        by_group = w_out.float().view(w_out.shape[0], groups, -1).permute(1, 2, 0)  # [G, S, D]
        return by_group @ self.fisher @ by_group.transpose(1, 2)


@dataclass
class Solution:
    """A router: logits = up @ (down @ x) + bias, the log of predicted importance over cost."""

    down: Tensor
    up: Tensor
    bias: Tensor
    r_squared: float


class Regression:
    """Normal equations of the log importance of each group on the router's input, summed over windows.

    For token t and group g: importance = h_g^T Q_g h_g, and the target is
    log(importance + FLOOR * mean so far) + SENSITIVITY * log(|g_t|^2 / mean |g|^2) - log(cost of the group).
    """

    def __init__(self, forms: Tensor, mean_sensitivity: float, cost: int, hidden_size: int) -> None:
        groups, device = forms.shape[0], forms.device
        self.forms = forms
        # allocated once: many small lasting tensors between large passing ones would tear the heap to pieces
        self.sampled_x = torch.empty(SAMPLED_ROWS, hidden_size, dtype=torch.bfloat16, device=device)
        self.sampled_importance = torch.empty(SAMPLED_ROWS, groups, device=device)
        self.rows = 0
        self.step = 1
        self.mean_sensitivity = mean_sensitivity
        self.log_cost = math.log(cost)
        self.tokens = 0
        self.importance = 0.0
        self.sum_y = torch.zeros(groups, device=device)
        self.sum_yy = torch.zeros(groups, device=device)
        self._xx: Tensor | None = None
        self._xy: Tensor | None = None
        self._sum_x: Tensor | None = None

    def add(self, sample: Sample) -> None:
        """Count one window."""
        importance = group_importance(sample.h, self.forms)
        self._take_rows(sample.x, importance)
        self.importance += float(importance.mean(1).sum())
        self.tokens += importance.shape[0]
        floor = FLOOR * self.importance / self.tokens
        sensitivity = sample.g.square().sum(1) / self.mean_sensitivity
        y = torch.log(importance + floor) - self.log_cost
        y += SENSITIVITY * torch.log(sensitivity + _SENSITIVITY_FLOOR)[:, None]
        x = sample.x
        if self._xx is None:
            self._xx, self._xy, self._sum_x = x.t() @ x, x.t() @ y, x.sum(0)
        else:
            assert self._xy is not None and self._sum_x is not None
            self._xx.addmm_(x.t(), x)
            self._xy.addmm_(x.t(), y)
            self._sum_x += x.sum(0)
        self.sum_y += y.sum(0)
        self.sum_yy += y.square().sum(0)

    def _take_rows(self, x: Tensor, importance: Tensor) -> None:
        """Keep every step-th row; when there is no more room, drop every other one and double the step."""
        while True:
            taken = torch.arange(-self.tokens % self.step, x.shape[0], self.step, device=x.device)
            if self.rows + len(taken) <= SAMPLED_ROWS:
                break
            for kept in (self.sampled_x, self.sampled_importance):
                kept[: (self.rows + 1) // 2] = kept[: self.rows : 2].clone()
            self.rows, self.step = (self.rows + 1) // 2, self.step * 2
        self.sampled_x[self.rows : self.rows + len(taken)] = x[taken].bfloat16()
        self.sampled_importance[self.rows : self.rows + len(taken)] = importance[taken]
        self.rows += len(taken)

    def solve(self, rank: int) -> Solution:
        """Ridge regression on the standardised input, cut to `rank` where there are more groups than that.

        The bias then makes the mean predicted importance of every group its mean true importance, over a fixed number
        of sampled rows. The mean hangs on few tokens, so both sides must be taken over the same ones.
        """
        assert self._xx is not None and self._xy is not None and self._sum_x is not None
        n = self.tokens
        mean_x, mean_y = self._sum_x.double() / n, self.sum_y.double() / n
        covariance = self._xx.double() / n - torch.outer(mean_x, mean_x)
        spread = covariance.diagonal().clamp_min(1e-12).sqrt() + 1e-6
        covariance /= torch.outer(spread, spread)
        cross = (self._xy.double() / n - torch.outer(mean_x, mean_y)) / spread[:, None]
        ridge = covariance + RIDGE * torch.eye(len(spread), dtype=torch.float64, device=covariance.device)
        weights = torch.cholesky_solve(cross, torch.linalg.cholesky(ridge))  # [D, G], of the standardised input
        fitted = weights.t() @ covariance @ weights  # [G, G]: covariance of the predictions
        groups = weights.shape[1]
        if groups > rank:
            # reduced-rank regression: the directions in which the predictions vary most
            basis = torch.linalg.eigh(fitted).eigenvectors[:, -rank:]  # [G, r]
            fitted = basis @ basis.t() @ fitted @ basis @ basis.t()
        else:
            basis = torch.eye(groups, dtype=torch.float64, device=weights.device)
        down = ((weights @ basis) / spread[:, None]).t()  # [r, D]
        total = self.sum_yy.double() / n - mean_y.square()
        explained = 2 * (weights @ basis @ basis.t() * cross).sum(0) - fitted.diagonal()
        x, importance = self.sampled_x[: self.rows].double(), self.sampled_importance[: self.rows].double()
        predicted = torch.logsumexp(x @ down.t() @ basis.t(), 0)
        bias = torch.log(importance.sum(0).clamp_min(1e-30)) - self.log_cost - predicted
        return Solution(
            down.float(), basis.float(), bias.float(), float(explained.sum() / total.sum().clamp_min(1e-12))
        )


def group_importance(h: Tensor, forms: Tensor) -> Tensor:
    """h_g^T Q_g h_g for each row and group: h [N, G*S], forms [G, S, S] -> float32 [N, G], never below 0."""
    by_group = h.view(h.shape[0], forms.shape[0], -1).transpose(0, 1)  # [G, N, S]
    return ((by_group @ forms) * by_group).sum(-1).t().clamp_min(0)
