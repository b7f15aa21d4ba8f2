"""Measure what applying an adapter costs: a merge with a LoRA adapter on one model, compared with a plain merge.

    python benchmarks/adapter_cost.py                      # 1.24 B parameters in bfloat16, rank 16 on every matrix
    python benchmarks/adapter_cost.py --size 2.58e8 --warm

Plain and adapted merges take turns. Each runs in its own process, started as a user starts it, and the first run of
each is discarded. The table lists the median, smallest and largest number of seconds and the ratio of the medians, for
the whole command and for the merge without the start of Python.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from checkpoints import Family, ensure, llama_family, weight_files
from measure import Measurement, evict, measure
from recipes import case
from safetensors.torch import save_file

_METHODS = "linear,slerp,task_arithmetic,ties,passthrough"
_SPREAD = 0.01


def make_adapter(family: Family, place: Path, rank: int) -> Path:
    """Write a LoRA adapter on every matrix of the layers in PEFT's format, unless it exists."""
    adapter = place / f"adapter-{rank}"
    if (adapter / "adapter_config.json").exists():
        return adapter
    adapter.mkdir(exist_ok=True)
    draw = torch.Generator().manual_seed(1)
    targets = [name for name, shape in family.shapes.items() if len(shape) == 2 and ".layers." in name]
    tensors = {}
    for name in targets:
        rows, columns = family.shapes[name]
        key = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(rank, columns, generator=draw) * _SPREAD
        tensors[f"{key}.lora_B.weight"] = torch.randn(rows, rank, generator=draw) * _SPREAD
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    modules = sorted({name.split(".")[-2] for name in targets})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules, "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter


def main() -> None:
    """Run the measurement and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default=1.24e9, type=float)
    parser.add_argument("--rank", default=16, type=int)
    parser.add_argument("--methods", default=_METHODS)
    parser.add_argument("--repeat", default=3, type=int)
    parser.add_argument("--warm", action="store_true", help="leave the inputs in the page cache")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "mergegate-bench")
    options = parser.parse_args()
    family = llama_family(options.size)
    place = ensure(family, options.directory)
    adapter = make_adapter(family, place, options.rank)
    print(
        f"{family.name}, {family.nbytes / 1e9:.2f} GB a checkpoint, rank {options.rank}; seconds, median (min to max)"
    )
    print("| method | plain | with an adapter | ratio | CPU, ratio | the merge alone, ratio |")
    print("|---|---|---|--:|--:|--:|")
    for method in options.methods.split(","):
        print(_row(method, family, place, adapter, options.repeat, options.warm), flush=True)


def _row(method: str, family: Family, place: Path, adapter: Path, repeat: int, warm: bool) -> str:
    chosen = case(method, family.fine_tunes)
    texts = {"plain": chosen.recipe, "adapted": chosen.recipe.replace("{model: one}", f"{{model: one+{adapter.name}}}")}
    inputs = [file for model in chosen.models for file in weight_files(place / model)]
    out = place / "out"
    runs: dict[str, list[Measurement]] = {name: [] for name in texts}
    for number in range(repeat + 1):
        for name, text in texts.items():
            recipe = place / f"{name}.yaml"
            recipe.write_text(text)
            shutil.rmtree(out, ignore_errors=True)
            if not warm:
                evict(inputs)
            command = [Path(sys.executable).with_name("mergegate"), "merge", recipe, out, "--device", "cpu", "--json"]
            run = measure(command, cwd=place)
            if number:  # The first run may compile kernels.
                runs[name].append(run)
    shutil.rmtree(out, ignore_errors=True)

    def cell(name: str) -> str:
        seconds = [run.seconds for run in runs[name]]
        return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"

    def ratio(of: str) -> str:
        values = {
            name: statistics.median(
                json.loads(run.output)["seconds"] if of == "merge" else getattr(run, of) for run in runs[name]
            )
            for name in runs
        }
        return f"{values['adapted'] / values['plain']:.2f}"

    ratios = " | ".join(ratio(of) for of in ("seconds", "cpu_seconds", "merge"))
    return f"| {method} | {cell('plain')} | {cell('adapted')} | {ratios} |"


if __name__ == "__main__":
    main()
