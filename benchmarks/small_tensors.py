"""Measure the cost per byte of merging small tensors, compared with large tensors of the same total size.

::

    .venv/bin/python benchmarks/small_tensors.py --repeat 3

The script compares 20,000 tensors of 64 KB and 400 of 3 MB with 20 of 64 MB. 3 MB is the size of the matrices of small
experts (Qwen3-30B-A3B: 768 x 2,048 in bfloat16). ``linear`` merges two parents of 1.3 GB each from the page cache. The
result is the processor time of the whole command. The parents are created once, below ``--directory``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np
from measure import Measurement, measure

PROJECT = Path(__file__).resolve().parent.parent
_BYTES, _WIDTH = 20_000 << 16, 256
_COUNTS = {"large": 20, "experts": 400, "small": 20_000}


def main() -> None:
    """Merge all of them in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "mergegate-small")
    options = parser.parse_args()
    recipes = {kind: _made(options.directory, kind, count) for kind, count in _COUNTS.items()}
    looks: dict[str, list[Measurement]] = {kind: [] for kind in recipes}
    for _ in range(options.repeat):
        for kind, recipe in recipes.items():
            with tempfile.TemporaryDirectory(dir=options.directory) as project:
                command = [sys.executable, "-m", "mergegate", "merge", recipe, "out"]
                looks[kind].append(measure(command, cwd=Path(project), environment={"PYTHONPATH": str(PROJECT)}))
    print("| tensors | seconds | CPU s/GB written | anonymous MiB |\n|---|---|---|---|")
    for kind, found in looks.items():
        cpu = statistics.median(look.cpu_seconds for look in found) / (_BYTES / 1e9)
        seconds = statistics.median(look.seconds for look in found)
        memory = max(look.peak_anonymous for look in found) / 2**20
        print(f"| {_COUNTS[kind]:,} {kind} | {seconds:.1f} | {cpu:.1f} | {memory:.0f} |")


def _made(directory: Path, kind: str, count: int) -> Path:
    """Write a recipe over two parents of ``count`` tensors."""
    recipe = directory / f"{kind}.yaml"
    if recipe.exists():
        return recipe
    shape = (_BYTES // count // 2 // _WIDTH, _WIDTH)
    for number, name in enumerate(("one", "two")):
        place = directory / kind / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        size = _BYTES // count
        header = {
            f"model.layers.{at // 256}.part{at % 256}.weight": {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": [at * size, (at + 1) * size],
            }
            for at in range(count)
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        values = np.random.default_rng(number).normal(0, 0.02, 1 << 20).astype(np.float32)
        block = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        with (place / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for first in range(0, _BYTES, len(block)):
                file.write(block[: _BYTES - first])
        (place / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    models = [{"model": f"{kind}/{name}"} for name in ("one", "two")]
    content = {"merge_method": "linear", "dtype": "bfloat16", "models": models, "parameters": {"weight": 0.5}}
    recipe.write_text(json.dumps(content))
    return recipe


if __name__ == "__main__":
    main()
