"""Timing several ways of doing one thing in turn, so that a busy or warming machine is unfair to none of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median over the rounds, and their spread (largest over smallest)."""

    ms: float
    spread: float


def alternate(
    calls: Mapping[str, Callable[[], object]], rounds: int = 3, seconds: float = 0.003, limit: float = 0.0
) -> dict[str, Timing]:
    """Time every call in each of `rounds` rounds, after a call that is not counted (two of short ones).

    seconds: what a round gives a call: one that takes less is repeated, and the mean of the repeats is the round's
    time. limit: stop after the round in which this many seconds have passed in all (0: never).
    """
    repeats = {}
    for name, call in calls.items():
        for _ in range(2):
            start = time.perf_counter()
            call()
            if time.perf_counter() - start > 10 * seconds:  # long ones need no second call to be warm
                break
        repeats[name] = max(1, min(1000, int(seconds / max(time.perf_counter() - start, 1e-7))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for _ in range(max(1, rounds)):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - start) / repeats[name])
        if limit and time.perf_counter() - began > limit:
            break
    return {name: Timing(statistics.median(t) * 1e3, max(t) / max(min(t), 1e-12)) for name, t in times.items()}
