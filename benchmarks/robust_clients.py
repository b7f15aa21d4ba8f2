"""Compare a mean, a median and a trimmed mean of five clients, one of them faulty.

The tables are in ``dev/measurements/method-quality.md``.

::

    .venv/bin/python benchmarks/robust_clients.py         # the demo family, a minute; prints Markdown

Two clients have learned to reverse letters and two to shift them. They are the demo's fine-tunes, each with its own
noise of a fifth of their size. The fifth client is noise five times as large as a fine-tune, or the honest mean with
its sign turned, five times as large.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from method_table import DEMO, TEST, demo_setting, means_of
from safetensors.torch import load_file, save_file

SCALES = (1.0, 1.8)
METHODS: dict[str, dict[str, Any]] = {"task_arithmetic": {}, "median": {}, "trimmed_mean": {"trim": 0.2}}


def make_client(place: Path, own: Mapping[str, torch.Tensor], scale: float, noise: float, draw: torch.Generator) -> str:
    """Write a checkpoint next to the base: ``scale`` times a task vector, plus noise of ``noise`` times its size."""
    shutil.copytree(DEMO / "models/base", place)
    base, made = load_file(DEMO / "models/base/model.safetensors"), {}
    for name, tensor in base.items():
        size = own[name].square().mean().sqrt()
        moved = scale * own[name] + noise * size * torch.randn(tensor.shape, generator=draw)
        made[name] = (tensor.float() + moved).to(tensor.dtype)
    save_file(made, place / "model.safetensors", metadata={"format": "pt"})
    return str(place)


def recipe_of(method: str, models: list[str], scale: float) -> dict[str, Any]:
    """Return a recipe that gives all models the same weight."""
    own = {"weight": 1 / len(models)} if method == "task_arithmetic" else {}
    return {
        "merge_method": method,
        "base_model": str(DEMO / "models/base"),
        "models": [{"model": model, "parameters": own} for model in models],
        "parameters": {**METHODS[method], "lambda": scale},
        "dtype": "bfloat16",
    }


def main() -> int:
    """Print the table."""
    from mergegate.tasks.models.checkpoints import end_model_process

    draw = torch.Generator().manual_seed(0)
    base, *tuned = (load_file(DEMO / "models" / name / "model.safetensors") for name in ("base", "reverser", "shifter"))
    reverse, shift = ({name: one[name].float() - base[name].float() for name in base} for one in tuned)
    mean = {name: (reverse[name] + shift[name]) / 2 for name in base}
    with tempfile.TemporaryDirectory(prefix="mergegate-clients-") as name:
        place = Path(name)
        honest = [
            make_client(place / f"{number}", own, 1, 0.2, draw) for number, own in enumerate([reverse, shift] * 2)
        ]
        absurd = {
            "four honest": [],
            "and noise x 5": [make_client(place / "noise", reverse, 0, 5, draw)],
            "four honest, one reversed x 5": [make_client(place / "turned", mean, -5, 0, draw)],
        }
        everybody = recipe_of("median", [*honest, *(one for more in absurd.values() for one in more)], 1.0)
        setting = demo_setting(everybody, place, {"search": 10, "confirmation": TEST}, ("exact",))
        print(f"| clients | scale | {' | '.join(METHODS)} |")
        print("|---|--:|" + "--:|" * len(METHODS))
        for who, more in absurd.items():
            for scale in SCALES:
                cells = []
                for method in METHODS:
                    recipe = recipe_of(method, honest + more, scale)
                    _, reversed_, shifted = means_of(setting, recipe, "confirmation")["exact"]
                    cells.append(f"{100 * reversed_:.1f} / {100 * shifted:.1f}")
                print(f"| {who} | {scale:g} | {' | '.join(cells)} |", flush=True)
        end_model_process()
    return 0


if __name__ == "__main__":
    sys.exit(main())
