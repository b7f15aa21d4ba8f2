"""Measure the CPU time per parameter of each pass of every merge method, and check that results keep their bits.

    .venv/bin/python benchmarks/kernel_rates.py                          # ns per parameter of the result, by pass
    .venv/bin/python benchmarks/kernel_rates.py --methods della,sce --kind float32
    .venv/bin/python benchmarks/kernel_rates.py --bits before.json       # digests of what generated families merge to
    .venv/bin/python benchmarks/kernel_rates.py --bits after.json --against before.json

Blocks have the size and layout of the engine's blocks. Reading, writing and hashing are not measured. The script uses
CPU time because other work on the machine lengthens wall-clock time. Each pass runs a few times in memory, on one
thread, and the shortest time counts.

A family is a base and its fine-tunes with values that may break a method: rows of one element, sizes that do not fill a
tile, magnitudes that are all tied, tensors of zeros, differences that vanish in bfloat16.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mergegate.merge_core.methods import mask_key, merge_methods
from mergegate.merge_core.methods.contract import GRAIN, Block, Fold, Map, Method, StoredBlock, TensorTask

BLOCK = 1 << 20
SHAPES = {"rows": (16384, 512), "long": (512, 16384)}
INPUTS = {
    **{"slerp": 2, "nuslerp": 2, "nearswap": 2, "arcee_fusion": 2, "passthrough": 1, "karcher": 3},
}
CHOSEN: dict[str, Any] = {"weight": 0.5, "t": 0.5, "density": 0.5, "select_topk": 0.5, "rate": 0.01}
# Further parameters that a recipe may set for methods whose passes depend on them.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sparse": {"density": 0.1, "select_topk": 0.03, "gamma": 0.2, "normalize": True, "epsilon": 0.05, "t": 1e-3},
    "rescaled": {"density": 0.7, "rescale": True, "consensus": "count", "select_topk": 0.9, "nuslerp_flatten": True},
    "uneven": {"density": 0.5, "rescale": "density", "gamma": 0.5, "select_topk": 1.0, "lambda": 0.7},
}
Numbers = np.ndarray[Any, Any]


def main() -> int:
    """Print the table, or write and compare digests; return 1 if a digest differs."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--methods", help="names, separated by commas")
    options.add_argument("--kind", choices=("bfloat16", "float32"), default="bfloat16")
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--bits", type=Path, help="write digests of merged families here")
    options.add_argument("--against", type=Path, help="digests to compare with")
    chosen = options.parse_args()
    methods = [m for name, m in sorted(merge_methods().items()) if name in (chosen.methods or name).split(",")]
    if chosen.bits:
        return bits(methods, chosen.bits, chosen.against)
    print(f"{'method':<18}{'tensor':<7}{'ns/parameter':>13}   by pass (the last is the map)")
    for method in methods:
        for name, shape in SHAPES.items():
            inputs = fine_tunes("normal", shape, INPUTS.get(method.name, 4), np.random.default_rng(0))
            merged, spent = carry_out(
                method, task_of(method, shape, len(inputs), {}), inputs, chosen.kind, chosen.repeat
            )
            each = [seconds / merged.size * 1e9 for seconds in spent]
            shares = "  ".join(f"{part:5.2f} ({part / sum(each):3.0%})" for part in each)
            print(f"{method.name:<18}{name:<7}{sum(each):>13.2f}   {shares}", flush=True)
    return 0


def bits(methods: list[Method], file: Path, against: Path | None) -> int:
    """Write a digest of every merged family to ``file``; return 1 if one differs from those of ``against``."""
    digests: dict[str, str] = {}
    for method in methods:
        for case, task, inputs, kind in families(method):
            merged, _ = carry_out(method, task, inputs, kind, 1)
            digests[f"{method.name} {case}"] = hashlib.sha256(merged.tobytes()).hexdigest()[:16]
    file.write_text(json.dumps(digests, indent=1))
    before = json.loads(against.read_text()) if against else digests
    other = [case for case, digest in digests.items() if before.get(case, digest) != digest]
    print("\n".join(f"other bits: {case}" for case in other))
    print(f"{len(digests)} families, {len(digests.keys() & before.keys())} compared, {len(other)} have other bits")
    return 1 if other else 0


def families(method: Method) -> Iterator[tuple[str, TensorTask, Numbers, str]]:
    """Yield cases of every kind: name, task, inputs ``[inputs, elements]`` float32, storage format."""
    shapes = ((1,), (7, 1), (1, 37), (5, 1024), (33, 1000), (3, 20000), (17, 4099), (4200, 300))
    kinds_of_numbers = ("normal", "tied", "wide", "zeros", "coarse", "close")
    for number, shape in enumerate(shapes):
        for what in kinds_of_numbers:
            for variant, values in VARIANTS.items():
                if number == len(shapes) - 1 and (what, variant) not in {("normal", "plain"), ("tied", "sparse")}:
                    continue  # The last shape is large: it spans two blocks.
                for kind in ("bfloat16", "float32"):
                    count = INPUTS.get(method.name, 3 if variant == "plain" else 4)
                    seed = np.random.default_rng([number, kinds_of_numbers.index(what)])
                    inputs = fine_tunes(what, shape, count, seed)
                    yield f"{shape} {what} {variant} {kind}", task_of(method, shape, count, values), inputs, kind


def fine_tunes(what: str, shape: tuple[int, ...], count: int, random: np.random.Generator) -> Numbers:
    """Return a base and ``count - 1`` fine-tunes of it."""
    size = int(np.prod(shape))
    base = random.standard_normal(size, np.float32) * np.float32(0.02)
    noise = random.standard_normal((count, size), np.float32) * np.float32(0.002)
    noise[0] = 0
    match what:
        case "tied":
            noise = np.sign(noise) * np.float32(2.0**-9)
            base = np.round(base * 64) / np.float32(64)
        case "wide":
            noise *= np.exp2(random.integers(-40, 20, noise.shape)).astype(np.float32)
        case "zeros":
            noise *= random.random(noise.shape, np.float32) < 0.02
        case "coarse":
            base, noise = np.round(base * 512) / np.float32(512), np.round(noise * 2048) / np.float32(2048)
        case "close":  # Differences inside one binade, which vanish in bfloat16.
            noise = np.float32(1e-3) + noise * np.float32(1e-5)
            noise[0] = 0
    return base + noise


def carry_out(method: Method, task: TensorTask, inputs: Numbers, kind: str, repeat: int) -> tuple[Numbers, list[float]]:
    """Return the merged numbers as they are stored, and the CPU seconds of each pass."""
    grain = method.grain(task.shape, task.shared)
    blocks = list(stored_blocks(inputs, kind, grain))
    merged = np.empty(task.numel, np.uint16 if kind == "bfloat16" else np.float32)
    steps, result, spent = method.steps(task), None, []
    while True:
        try:
            step: Any = steps.send(result)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as stop:
            step = stop.value
        if isinstance(step, Fold) and step.sample_count:
            result = one_pass(step, list(sampled_blocks(inputs, kind, grain, step.sample_count)), merged)
            continue
        least = float("inf")
        for _ in range(repeat):
            began = time.thread_time()
            result = one_pass(step, blocks, merged)
            least = min(least, time.thread_time() - began)
        spent.append(least)
        if isinstance(step, Map):
            return merged, spent


def one_pass(step: Fold | Map, blocks: list[StoredBlock], merged: Numbers) -> Any:
    """Run one pass and return the result of a fold, or None for the map, which fills ``merged``."""
    if isinstance(step, Map):
        for block in blocks:
            out = merged[block.start : block.start + block.length]
            if step.map_stored is not None:
                step.map_stored(block, out)
            else:
                out[:] = stored(np.concatenate([step.map_block(tile).numpy() for tile in tiles(block)]), out.dtype)
        return None
    parts: list[Any] = []
    for block in blocks:
        if step.reduce_stored is not None:
            found = [step.reduce_stored(block)]
        else:
            found = [step.reduce_block(tile).numpy().copy() for tile in tiles(block)]
        parts = [step.combine([*parts, *found])] if step.eager else [*parts, *found]
    return step.combine(parts)


def stored_blocks(inputs: Numbers, kind: str, grain: int) -> Iterator[StoredBlock]:
    """Yield the blocks that the engine would pass to kernels."""
    size = max(1, BLOCK // grain) * grain
    return blocks_of(inputs, kind, grain, size, range(-(-inputs.shape[1] // size)))


def sampled_blocks(inputs: Numbers, kind: str, grain: int, count: int) -> Iterator[StoredBlock]:
    """Yield the blocks that the engine would pass to kernels for a sample."""
    size = max(1, GRAIN // grain) * grain
    pieces = inputs.shape[1] // size
    numbers = sorted({(2 * index + 1) * pieces // (2 * count) for index in range(count)})
    return blocks_of(inputs, kind, grain, size, numbers)


def blocks_of(inputs: Numbers, kind: str, grain: int, size: int, numbers: Iterable[int]) -> Iterator[StoredBlock]:
    """Yield the blocks of ``size`` elements with the given ``numbers``."""
    for start in (number * size for number in numbers):
        part = stored(inputs[:, start : start + size], np.dtype(np.uint16 if kind == "bfloat16" else np.float32))
        rows = np.arange(len(part), dtype=np.int64) * part.shape[1]
        yield StoredBlock(np.ascontiguousarray(part).reshape(-1), rows, part.shape[1], start, grain)


def tiles(block: StoredBlock) -> Iterator[Block]:
    """Split a block into the engine's tiles, for the torch reference of a pass that has no kernel."""
    import torch

    torch.set_num_threads(1)
    rows = block.data.reshape(len(block.rows), block.length)
    wide = rows if rows.dtype == np.float32 else (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    size = max(1, (1 << 15) // block.grain) * block.grain
    for first in range(0, block.length, size):
        yield Block(torch.from_numpy(wide[:, first : first + size].copy()), block.start + first, block.grain)


def stored(numbers: Numbers, dtype: np.dtype[Any]) -> Numbers:
    """Return float32 as it is stored: unchanged, or as bit patterns of bfloat16 (rounded to nearest even)."""
    if dtype == np.float32:
        return numbers
    patterns = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((patterns + 0x7FFF + (patterns >> 16 & 1)) >> 16).astype(np.uint16)


def task_of(method: Method, shape: tuple[int, ...], inputs: int, values: dict[str, Any]) -> TensorTask:
    """Return a task with those parameters of ``values`` that the method has."""
    has_base = method.base == "required"
    chosen = {p.name: p.default for p in method.parameters} | CHOSEN | values
    shared = {p.name: chosen[p.name] for p in method.parameters if p.scope == "shared"}
    own = {p.name: chosen[p.name] for p in method.parameters if p.scope != "shared"}
    each = [{**own, "weight": own["weight"] * (0.6 + 0.2 * n)} if "weight" in own else own for n in range(inputs)]
    return TensorTask(
        name="model.layers.0.mlp.up_proj.weight",
        shape=shape,
        dtype="float32",
        has_base=has_base,
        shared=shared,
        per_input=tuple({} if has_base and index == 0 else each[index] for index in range(inputs)),
        seeds=tuple(mask_key(0, "x", index) for index in range(inputs)),
    )


if __name__ == "__main__":
    sys.exit(main())
