"""CPU time as a ratio: neither a slow machine nor a busy one changes how work grows with its input."""

from __future__ import annotations

import os
from collections.abc import Callable


def cpu_seconds(run: Callable[[], object]) -> float:
    """CPU time of ``run``, in this process and in the children that ended meanwhile."""
    before = os.times()
    run()
    after = os.times()
    return sum(after[:4]) - sum(before[:4])


def growth(small: Callable[[], object], large: Callable[[], object], rounds: int = 3) -> float:
    """How much more CPU time ``large`` takes than ``small``: the best of both, measured in turn."""
    times = [(cpu_seconds(small), cpu_seconds(large)) for _ in range(rounds)]
    least, most = (min(each) for each in zip(*times, strict=True))
    return most / max(least, 1 / 100)  # what the system's clock can tell
