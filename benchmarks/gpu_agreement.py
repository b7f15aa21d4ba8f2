"""Merge a family on the CPU and on the GPU with each method, and count the elements that differ.

    python benchmarks/gpu_agreement.py                          # all methods, 0.2 B parameters in bfloat16
    python benchmarks/gpu_agreement.py --size 1.236e9 --methods linear,ties

Both merges run in this process, so the times exclude the start of Python. The first GPU merge of a method loads its
kernels; the second one is measured. Only ``merge_core`` is imported: the environment needs torch with CUDA, NumPy,
numba, SciPy, pydantic, PyYAML and safetensors.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs without mergegate being installed

import torch
from checkpoints import ensure, llama_family
from recipes import METHODS, case
from safetensors.torch import load_file

from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_merge


def main() -> None:
    """Run the comparison and print one row per method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=2e8, help="number of parameters")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods, separated by commas")
    parser.add_argument("--directory", type=Path, default=Path("/tmp/mergegate-gpu"), help="where the files go")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_agreement: no CUDA device is visible")
    family = llama_family(options.size)
    models = ensure(family, options.directory)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {family.parameters / 1e6:,.0f} M parameters\n")
    print("| method | CPU, s | GPU, s | GPU memory, MB | elements that differ |\n|---|---|---|---|---|")
    for method in options.methods.split(","):
        recipe = load_recipe(case(method, family.fine_tunes).recipe)
        plan = plan_merge(recipe, {str(ref): open_checkpoint(models / ref.path) for ref in recipe.references()})
        seconds = {}
        torch.cuda.reset_peak_memory_stats()
        for device in ("cpu", "cuda", "cuda"):
            output = options.directory / "merges" / device
            shutil.rmtree(output, ignore_errors=True)
            begin = time.perf_counter()
            merge_weights(plan, output, device=device)
            seconds[device] = time.perf_counter() - begin
        memory = torch.cuda.max_memory_allocated() / 1e6
        different = 0
        for file in sorted((options.directory / "merges" / "cpu").glob("*.safetensors")):
            on_gpu = load_file(options.directory / "merges" / "cuda" / file.name)
            for name, on_cpu in load_file(file).items():
                different += int((on_cpu.view(torch.int16) != on_gpu[name].view(torch.int16)).sum())
        row = [method, f"{seconds['cpu']:.1f}", f"{seconds['cuda']:.1f}", f"{memory:,.0f}", f"{different:,}"]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
