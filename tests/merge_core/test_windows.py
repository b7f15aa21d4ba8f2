"""Windows for the k largest values are guessed separately for each stream, in little memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mergegate.merge_core.methods.contract import GRAIN, Fold
from mergegate.merge_core.methods.scores import ScoreFunction, SelectionRequest
from mergegate.merge_core.methods.windows import guess_windows

# Large enough that a small sample suffices for a guess, as in the largest tensors.
NUMEL = 100 << 20
STREAMS = 3


def begun(requests: Sequence[SelectionRequest]) -> Fold:
    scores = ScoreFunction(lambda block: torch.empty(0), "float32")
    return next(guess_windows(scores, requests, NUMEL))


def test_windows_are_guessed_one_stream_at_a_time() -> None:
    """The guess needs only the memory to sort a sample of one stream at a time."""
    requests = [SelectionRequest(stream, k) for stream in range(STREAMS) for k in (NUMEL // 4, NUMEL // 2)]
    fold, generator = begun(requests), np.random.default_rng(0)
    parts: list[Any] = [
        np.abs(generator.standard_normal((STREAMS, GRAIN), np.float32)).view(np.int32) for _ in range(fold.sample_count)
    ]
    one = fold.sample_count * GRAIN * parts[0].itemsize
    tracemalloc.start()
    try:
        windows = fold.combine(parts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * one, f"{peak / one:.1f} of one stream"
    assert [window.stream for window in windows] == [request.stream for request in requests]


def test_the_window_of_a_request_does_not_depend_on_other_requests() -> None:
    requests = [SelectionRequest(stream, k) for k in (NUMEL // 4, NUMEL // 2) for stream in range(STREAMS)]
    fold, generator = begun(requests), np.random.default_rng(1)
    scales = np.array([[1.0], [2.0], [3.0]], np.float32)
    parts: list[Any] = [
        np.abs(scales * generator.standard_normal((STREAMS, GRAIN), np.float32)).view(np.int32)
        for _ in range(fold.sample_count)
    ]
    windows = fold.combine(parts)
    assert windows == [window for request in requests for window in begun([request]).combine(parts)]
    assert len(set(windows)) == len(requests)


def test_nan_does_not_stop_the_guess() -> None:
    """NaN is found and refused later, when the full tensor is read."""
    fold = begun([SelectionRequest(0, 1)])
    parts: list[Any] = [np.full((1, GRAIN), 0x7FFFFFFF, np.int32) for _ in range(fold.sample_count)]
    assert len(fold.combine(parts)) == 1
