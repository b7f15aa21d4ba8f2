"""Measure what RegMean retains, depending on the texts its models have read.

The tables are in ``dev/measurements/method-quality.md``.

::

    .venv/bin/python benchmarks/regmean_texts.py         # the demo family, two minutes; prints Markdown

The table lists right answers out of 1,000 documents per skill, exact match in %, of merges without any tuning.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from method_table import DEMO, TEST, demo_setting, means_of

sys.path.insert(0, str(DEMO))
from language import draw  # the demo's own

MODELS = ("reverser", "shifter")
OWN = {"reverser": "rev", "shifter": "shift"}


def write_text(path: Path, kinds: Iterable[str], seed: int) -> str:
    """Write training documents of these kinds to ``path``."""
    rng = random.Random(seed)
    drawn = [draw(kind, rng, held_out=False) for kind in kinds]
    path.write_text("".join(json.dumps({"text": one.prompt + one.answer}) + "\n" for one in drawn))
    return str(path)


def recipe_of(texts: tuple[str, str], off_diagonals: float) -> dict[str, Any]:
    """Return a RegMean recipe of both fine-tunes, each with its text."""
    models = [{"model": str(DEMO / "models" / name), "text": text} for name, text in zip(MODELS, texts, strict=True)]
    shared = {"off_diagonals": off_diagonals}
    return {"merge_method": "regmean", "models": models, "parameters": shared, "dtype": "bfloat16"}


def main() -> int:
    """Print the table."""
    from mergegate.tasks.models.checkpoints import end_model_process

    with tempfile.TemporaryDirectory(prefix="mergegate-regmean-") as name:
        place = Path(name)

        def own(label: str, documents: int, copying: int) -> tuple[str, str]:
            kinds = {model: [skill] * documents + ["copy"] * copying for model, skill in OWN.items()}
            pairs = [(place / f"{label}-{model}.jsonl", kinds[model]) for model in MODELS]
            first, second = (write_text(path, kind, seed) for seed, (path, kind) in enumerate(pairs))
            return first, second

        usual, alone = own("usual", 64, 16), own("skill", 64, 0)
        both = write_text(place / "both.jsonl", ["rev"] * 64 + ["shift"] * 64 + ["copy"] * 32, 2)
        cases: dict[str, tuple[tuple[str, str], float]] = {
            "its own skill and copying, off-diagonals x .9": (usual, 0.9),
            "the same, x .5": (usual, 0.5),
            "the same, x 0": (usual, 0.0),
            "the same, x 1": (usual, 1.0),
            "its own skill alone, x .9": (alone, 0.9),
            "its own skill alone, x 1": (alone, 1.0),
            "2 documents of its skill and 1 of copying, x .9": (own("few", 2, 1), 0.9),
            "8 and 2, x .9": (own("some", 8, 2), 0.9),
            "the other's text, x .9": ((usual[1], usual[0]), 0.9),
            "the other's skill alone, x .9": ((alone[1], alone[0]), 0.9),
            "both read everything, x .9": ((both, both), 0.9),
        }
        recipes = {case: recipe_of(*what) for case, what in cases.items()}
        sizes = {"search": 10, "confirmation": TEST}
        setting = demo_setting(next(iter(recipes.values())), place, sizes, ("exact",), list(recipes.values()))
        print("| text of each model | reversing | shifting | copying |")
        print("|---|--:|--:|--:|")
        for case, recipe in recipes.items():
            copied, reversed_, shifted = (100 * share for share in means_of(setting, recipe, "confirmation")["exact"])
            print(f"| {case} | {reversed_:.1f} | {shifted:.1f} | {copied:.1f} |", flush=True)
        end_model_process()
    return 0


if __name__ == "__main__":
    sys.exit(main())
