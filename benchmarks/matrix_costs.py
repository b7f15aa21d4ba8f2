"""Measure seconds and memory of methods on whole matrices, and print the plan's estimates for whole models.

::

    .venv/bin/python benchmarks/matrix_costs.py                    # some ten minutes; prints Markdown
    .venv/bin/python benchmarks/matrix_costs.py --largest 2048     # without the large ones
    .venv/bin/python benchmarks/matrix_costs.py --largest 0        # only what reading texts takes

The engine merges two random bfloat16 models and a base, one matrix each, in one thread of a separate process. Memory is
the process's peak minus its memory before the merge. The number in brackets is the plan's estimate, without blocks.
For models of 8 and 70 B, known only by their headers, the script converts the plan's number of operations to hours at
the measured speed. It also estimates what reading a text for two of them takes, at the speed of float32 products on all
cores of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT / "tests" / "plan"))

SIZES = ((1024, 1024), (2048, 2048), (2048, 8192), (8192, 2048), (4096, 4096))
METHODS = ("regmean", "wudi", "ace", "svc", "tsv_m", "knots")
READERS = ("regmean", "fisher")  # methods that read texts
TEXT = "own.jsonl"
DOCUMENTS, TOKENS = 256, 2048
NAME = "model.layers.0.mlp.up_proj.weight"
LLAMA_8B = {"layers": 32, "hidden": 4096, "wide": 14336, "keys": 1024, "tokens": 128256}


def make_family(place: Path, shape: tuple[int, int]) -> None:
    """Write a base and two models of one matrix, and the statistics of a text with as many positions as its columns."""
    from mergegate.merge_core.checkpoint import INPUTS, measurement_file_name, pack_moments, write_measurement

    draw = torch.Generator().manual_seed(0)
    base = torch.randn(shape, generator=draw) * 0.02
    embedding = torch.zeros(4, shape[1], dtype=torch.bfloat16)
    for name in ("base", "a", "b"):
        own = base if name == "base" else base + 1e-3 * torch.randn(shape, generator=draw)
        (place / name).mkdir(parents=True)
        tensors = {"model.embed_tokens.weight": embedding, NAME: own.bfloat16()}
        save_file(tensors, place / name / "model.safetensors", {"format": "pt"})
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
        (place / name / "config.json").write_text(json.dumps(config))
        (place / name / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {}}}')
        inputs = torch.randn(shape[1], shape[1], generator=draw)
        (place / f"{name}-inputs").mkdir()
        moments = torch.from_numpy(pack_moments((inputs.T @ inputs / shape[1]).numpy()))
        save_file({NAME: moments}, place / f"{name}-inputs" / measurement_file_name(INPUTS, 0))
        write_measurement(place / f"{name}-inputs" / INPUTS, {NAME: NAME}, shape[1])


def plan_of(method: str, place: Path):  # type: ignore[no-untyped-def]
    """Return the plan of a merge of two models."""
    from mergegate.merge_core import load_recipe, open_checkpoint, plan_merge
    from mergegate.merge_core.checkpoint import open_moments
    from mergegate.merge_core.recipe import InputMeasurements

    text = {"text": str(place / TEXT)} if method in READERS else {}
    models = [{"model": name, **text} for name in ("a", "b")]
    recipe = load_recipe({"merge_method": method, "base_model": "base", "models": models})
    if recipe.texts and (place / "a-inputs").is_dir():
        known = {name: InputMeasurements(name, name, open_moments(place / f"{name}-inputs")) for name in ("a", "b")}
        recipe = replace(recipe, measured=known)
    return plan_merge(recipe, {name: open_checkpoint(place / name) for name in ("base", "a", "b")})


def merge_one(method: str, place: Path) -> None:
    """Merge in one thread, and print seconds, peak memory, and the plan's estimates of both."""
    from mergegate.merge_core import EngineSettings, merge_tensors
    from mergegate.merge_core.engine.forecast import estimate_needs

    plan = plan_of(method, place)
    settings = EngineSettings(threads=1)
    needs = estimate_needs(plan, settings, cores=1, device="cpu")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = peak_bytes()
    began = time.process_time()
    for _ in merge_tensors(plan, settings=settings):
        pass
    seconds = time.process_time() - began
    peak = peak_bytes() - before
    print(json.dumps({"seconds": seconds, "peak": peak, "held": needs.held_bytes, "products": needs.products}))


def peak_bytes() -> int:
    """Return the peak memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


def measured(method: str, shape: tuple[int, int]) -> dict[str, float]:
    """Measure one merge in a separate process that has imported and warmed up torch."""
    with tempfile.TemporaryDirectory(prefix="mergegate-matrix-") as name:
        make_family(Path(name), shape)
        command = [sys.executable, __file__, "--one", method, name]
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **one_thread})
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def main() -> int:
    """Run the measurements and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", default=4096, type=int)
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "PLACE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        torch.set_num_threads(1)
        torch.linalg.cholesky(torch.eye(64, dtype=torch.float64) @ torch.eye(64, dtype=torch.float64))
        merge_one(options.one[0], Path(options.one[1]))
        return 0
    if options.largest:
        print_matrices([shape for shape in SIZES if min(shape) <= options.largest])
    print_reading()
    return 0


def print_matrices(sizes: list[tuple[int, int]]) -> None:
    """Print the costs of single matrices and of whole models."""
    print("| method | " + " | ".join(f"{out} x {width}" for out, width in sizes) + " | 10^9 operations a second |")
    print("|---|" + "--:|" * (len(sizes) + 1))
    speed: dict[str, float] = {}
    for method in METHODS:
        cells, rates = [], []
        for shape in sizes:
            found = measured(method, shape)
            rates.append(found["products"] / found["seconds"])
            peak, held = found["peak"] / 2**30, found["held"] / 2**30
            cells.append(f"{found['seconds']:.1f} s, {peak:.2f} GiB ({held:.2f})")
        speed[method] = float(np.median(rates[1:]))
        print(f"| `{method}` | {' | '.join(cells)} | {speed[method] / 1e9:.0f} |", flush=True)
    print()
    print("| method, two models | 8 B: hours on one core | held | 70 B: hours on one core | held |")
    print("|---|--:|--:|--:|--:|")
    for method in METHODS:
        cells = []
        for shapes in (LLAMA_8B, None):
            hours, held = whole_model(method, shapes, speed[method])
            cells.append(f"{hours:.1f} | {held:.1f} GiB")
        print(f"| `{method}` | {' | '.join(cells)} |", flush=True)
    print()


def print_reading() -> None:
    """Print what reading texts takes for whole models."""
    from mergegate.merge_core.engine.forecast import Rates
    from mergegate.merge_core.system import system_memory

    rates = Rates(*(1.0,) * 5, same_disk=False, measured_at=time.time(), products=product_speed())
    memory = system_memory()
    room = memory.total // 2 if memory else 1 << 33
    columns = "10^15 operations | hours | sums | kept"
    print(f"| {DOCUMENTS} documents of {TOKENS:,} tokens for each of two models | 8 B: {columns} | 70 B: {columns} |")
    print("|---|" + "--:|" * 8)
    for method in READERS:
        cells = []
        for shapes in (LLAMA_8B, None):
            needs = reading(method, shapes)
            hours = (needs.seconds(rates, room) or 0) / 3600
            sizes = (f"{size / 2**30:.1f} GiB" for size in (needs.sums, needs.nbytes))
            cells.append(" | ".join((f"{needs.operations / 1e15:.0f}", f"{hours:.0f}", *sizes)))
        print(f"| `{method}` | {' | '.join(cells)} |", flush=True)


def product_speed() -> float:
    """Return the operations per second of a float32 product on all cores."""
    matrix, took = torch.rand(2048, 2048), []
    for _ in range(5):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        took.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(took)


def reading(method: str, sizes: dict[str, int] | None):  # type: ignore[no-untyped-def]
    """Return the plan's estimate of reading, from headers."""
    from sparse_models import LLAMA_70B, llama, save_sparse

    from mergegate.merge_core.files import HashMemo
    from mergegate.tasks.merge.calibration import statistics_needs

    with tempfile.TemporaryDirectory(prefix="mergegate-text-") as name:
        place = Path(name)
        for model in ("base", "a", "b"):
            save_sparse(place / model, llama(**(sizes or LLAMA_70B)))
        (place / TEXT).write_text(f"{json.dumps({'text': 'word' * TOKENS})}\n" * DOCUMENTS)
        return statistics_needs(plan_of(method, place), HashMemo(place / "hashes.db"))


def whole_model(method: str, sizes: dict[str, int] | None, speed: float) -> tuple[float, float]:
    """Return the hours of one core and the GiB in memory that the plan adds up from headers."""
    from sparse_models import LLAMA_70B, llama, save_sparse

    from mergegate.merge_core import EngineSettings
    from mergegate.merge_core.engine.forecast import estimate_needs

    with tempfile.TemporaryDirectory(prefix="mergegate-plan-") as name:
        for model in ("base", "a", "b"):
            save_sparse(Path(name) / model, llama(**(sizes or LLAMA_70B)))
        needs = estimate_needs(plan_of(method, Path(name)), EngineSettings(threads=1), cores=1, device="cpu")
    return needs.products / speed / 3600, needs.held_bytes / 2**30


if __name__ == "__main__":
    sys.exit(main())
