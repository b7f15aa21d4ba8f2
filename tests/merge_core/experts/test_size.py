"""Memory use does not grow with the size of a fused tensor: a tensor of 8 GB is merged within 1 GiB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mergegate.merge_core.checkpoint import render_header

pytestmark = pytest.mark.proof

EXPERTS, WIDE, HIDDEN = 128, 4096, 4096  # In bfloat16, the gate and up projections take 8.6 GB.
MERGE = r"""
import re
from pathlib import Path
from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_merge
recipe = load_recipe({"merge_method": "linear", "models": [{"model": n, "parameters": {"weight": 1}} for n in "ab"]})
plan = plan_merge(recipe, {name: open_checkpoint(Path(name)) for name in "ab"})
assert len(plan.jobs) == 128, len(plan.jobs)
merge_weights(plan, Path("out"))
# Not ru_maxrss: that begins with what whoever started this process had in use.
print(int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024, plan.bytes_written)
"""


def sparse(directory: Path) -> None:
    """Write a config and a sparse weights file whose experts are holes, which read as zeros."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["X"], "model_type": "qwen3_moe"}))
    module = "model.layers.0.mlp.experts"
    shapes = {f"{module}.gate_up_proj": (EXPERTS, 2 * WIDE, HIDDEN)}
    sizes = [(name, "BF16", shape, 2 * shape[0] * shape[1] * shape[2]) for name, shape in shapes.items()]
    header = render_header(sizes, {"format": "pt"})
    with (directory / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(size for *_, size in sizes))


def test_a_fused_tensor_of_8_gb_takes_less_than_1_gib(tmp_path: Path) -> None:
    for name in "ab":
        sparse(tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", MERGE], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peak, written = map(int, done.stdout.split())
    (tmp_path / "out/model.safetensors").unlink()
    assert written > 8 << 30
    assert peak < 1 << 30
