"""Measure every merge method's arithmetic in units of a plain loop: the ``costs`` that each declares in its file.

    .venv/bin/python benchmarks/method_costs.py

Passes run on one thread over random bfloat16 blocks in memory, with the kernels that the engine would use. A unit is
the time per element of :func:`merge_core.engine.forecast.probe.reference_pass` on the same machine at the same moment,
so the numbers are roughly valid on machines of other speeds.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from mergegate.merge_core.engine.forecast.probe import reference_pass
from mergegate.merge_core.methods.contract import REQUIRED, Block, Fold, Map, Method, StoredBlock, TensorTask
from mergegate.merge_core.methods.masks import mask_key
from mergegate.merge_core.methods.registry import merge_methods

ROWS, COLUMNS = 512, 4096
ELEMENTS = ROWS * COLUMNS
TILE = 1 << 15
REQUIRED_VALUES = {"weight": 0.5, "t": 0.5, "rate": 0.01}
INPUTS = {
    **{"slerp": 2, "nuslerp": 2, "nearswap": 2, "arcee_fusion": 2, "passthrough": 1},
}
CHOSEN = {"density": 0.5, "select_topk": 0.5}


def main() -> None:
    """Print one line per method: units per input element in its folds (together) and in its map."""
    torch.set_num_threads(1)
    print(f"{'method':<18}{'folds':>6}{'fold units':>12}{'map units':>12}   kernels")
    for name, method in sorted(merge_methods().items()):
        inputs = INPUTS.get(name, 4)
        folds, fold_time, map_time, fused = measured(method, inputs)
        unit = min(unit_time() for _ in range(5))
        per_fold = fold_time / max(folds, 1) / inputs / unit
        print(f"{name:<18}{folds:>6}{per_fold:>12.2f}{map_time / inputs / unit:>12.2f}   {fused}")


def unit_time() -> float:
    """Return the CPU seconds of the reference loop for :data:`ELEMENTS` elements."""
    began = time.thread_time()
    reference_pass(ELEMENTS)
    return time.thread_time() - began


def measured(method: Method, inputs: int) -> tuple[int, float, float, str]:
    """Return the number of folds, the seconds of folds and map for :data:`ELEMENTS` elements, and the kernels."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(ELEMENTS, generator=generator) * 0.02
    noise = torch.randn(inputs, ELEMENTS, generator=generator) * 0.002
    stored = (base + noise).to(torch.bfloat16)
    task = task_of(method, inputs)
    grain = method.grain(task.shape, task.shared)
    numbers: Any = stored.view(torch.uint16).numpy().reshape(-1)
    block = StoredBlock(numbers, np.arange(inputs, dtype=np.int64) * ELEMENTS, ELEMENTS, 0, grain)
    steps = method.steps(task)
    result: Any = None  # None starts a generator.
    folds, seconds, fused = 0, 0.0, True
    while True:
        try:
            step: Fold | Map = steps.send(result)
        except StopIteration as stop:
            step = stop.value
        began, spent = time.thread_time(), float("inf")
        for _ in range(3):
            began = time.thread_time()
            parts = run(step, block, stored, grain)
            spent = min(spent, time.thread_time() - began)
        fused &= (step.map_stored if isinstance(step, Map) else step.reduce_stored) is not None
        if isinstance(step, Map):
            return folds, seconds, spent, "fused" if fused else "torch"
        folds += 1
        seconds += spent
        result = step.combine(parts)


def run(step: Fold | Map, block: StoredBlock, stored: torch.Tensor, grain: int) -> list[Any]:
    """Run one pass over all elements."""
    if isinstance(step, Map) and step.map_stored is not None:
        step.map_stored(block, np.empty(ELEMENTS, np.uint16))
        return []
    if isinstance(step, Fold) and step.reduce_stored is not None:
        return [step.reduce_stored(block)]
    size = max(1, TILE // grain) * grain
    tiles = []
    for first in range(0, ELEMENTS, size):
        inputs = torch.stack([row[first : first + size].float() for row in stored])
        tiles.append(Block(inputs, first, grain, importance=inputs.square()))
    if isinstance(step, Map):
        torch.cat([step.map_block(tile).to(torch.bfloat16) for tile in tiles])
        return []
    return [step.reduce_block(tile).numpy().copy() for tile in tiles]


def task_of(method: Method, inputs: int) -> TensorTask:
    """Return a task with typical values of the method's parameters."""
    has_base = method.base == "required"
    values = {
        parameter.name: CHOSEN.get(
            parameter.name, REQUIRED_VALUES[parameter.name] if parameter.default is REQUIRED else parameter.default
        )
        for parameter in method.parameters
    }
    shared = {p.name: values[p.name] for p in method.parameters if p.scope == "shared"}
    own = {p.name: values[p.name] for p in method.parameters if p.scope != "shared"}
    return TensorTask(
        name="model.layers.0.mlp.up_proj.weight",
        shape=(ROWS, COLUMNS),
        dtype="float32",
        has_base=has_base,
        shared=shared,
        per_input=tuple({} if has_base and index == 0 else own for index in range(inputs)),
        seeds=tuple(mask_key(0, "x", index) for index in range(inputs)),
        has_importance=True,
    )


if __name__ == "__main__":
    main()
