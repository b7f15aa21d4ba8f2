"""Write the detailed trials of ``families.json``: each merge feature tried with each family, in some minutes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from family_trials import DONE, merged, try_adapter, try_experts, try_vocabulary
from in_memory import average, stack
from tiny_families import BY_NAME, FAMILIES, LAYERS, TinyFamily, load, logits, make

from mergegate.merge_core import architecture, load_recipe, open_checkpoint

DOCUMENT = Path(architecture.__file__).parent / "families.json"
WHOLE = "merge_method: linear\nmodels: [{model: a, parameters: {weight: 0.3}}, {model: b, parameters: {weight: 0.7}}]\n"
Cut = list[tuple[str, int, int]]
_COLUMNS = ("whole models", "slices", "vocabulary", "adapters", "experts")


def depth(family: TinyFamily) -> int:
    """Return the number of layers in a family's checkpoint, per stack for families with an encoder and a decoder."""
    return 3 if family.model_type in ("whisper", "t5") else LAYERS


def cuts(family: TinyFamily) -> dict[str, Cut]:
    """Return three cuts: two models joined, one model without a layer, and one model with a layer repeated."""
    n = depth(family)
    return {
        "joined": [("a", 0, n - 1), ("b", 1, n)],
        "shortened": [("a", 0, 1), ("a", 2, n)],
        "doubled": [("a", 0, 2), ("a", 1, n)],
    }


def recipe_of(cut: Cut) -> str:
    """Return a passthrough recipe that stacks the slices of a cut."""
    slices = "".join(f"- sources: [{{model: {model}, layer_range: [{start}, {end}]}}]\n" for model, start, end in cut)
    return f"merge_method: passthrough\nslices:\n{slices}"


def merge_or_refuse(text: str, root: Path, out: str) -> str | None:
    """Merge, or return the key or tensor that the blocking finding names."""
    tables = {str(ref): open_checkpoint(root / ref.path) for ref in load_recipe(text).references()}
    refusal = merged(text, tables, root / out)
    return refusal and refusal.removeprefix("refused: `").removesuffix("`")


def parents_of(family: TinyFamily, root: Path) -> dict[str, Any]:
    """Save checkpoints ``root / "a"`` and ``root / "b"``, and return the models that transformers loads from them."""
    return {name: load(family, make(family, root / name, seed)) for seed, name in enumerate("ab")}


def tried(family: TinyFamily, models: Mapping[str, Any], root: Path) -> dict[str, str]:
    """Merge full models and each of :func:`cuts`, and return ``✓`` or the key of the refusal for each."""
    found = {}
    for name, text in {"whole": WHOLE, **{name: recipe_of(cut) for name, cut in cuts(family).items()}}.items():
        refused = merge_or_refuse(text, root, name)
        if refused is not None:
            found[name] = refused
            continue
        if name == "whole":
            expected = average([models["a"], models["b"]], [0.3, 0.7])
        else:
            picks = [(models[model], index) for model, start, end in cuts(family)[name] for index in range(start, end)]
            expected = stack(picks, depth(family))
        computed = logits(family, load(family, root / name))
        assert torch.equal(computed, logits(family, expected)), f"{family.name}: {name}"
        found[name] = DONE
    return found


def cells(found: Mapping[str, str]) -> tuple[str, str]:
    """Return the ``whole`` and ``slices`` cells of a row."""
    keys = dict.fromkeys(key for name, key in found.items() if name != "whole" and key != DONE)
    refused = "refused: " + "; ".join(f"`{key}`" for key in keys)
    passed = [name for name, key in found.items() if name != "whole" and key == DONE]
    slices = DONE if not keys else f"{DONE} where the kinds allow, else {refused}" if passed else refused
    return found["whole"] if found["whole"] == DONE else f"refused: `{found['whole']}`", slices


def parts(family: TinyFamily, models: Mapping[str, Any], root: Path) -> tuple[str, str, str]:
    """Return the ``vocabulary``, ``adapters`` and ``experts`` cells of a row."""
    return try_vocabulary(family, models, root), try_adapter(family, models, root), try_experts(family, models, root)


def row_of(family: TinyFamily, root: Path) -> list[str]:
    """Return all cells of a family's row, by running the trials on one pair of models."""
    models = parents_of(family, root)
    return [*cells(tried(family, models, root)), *parts(family, models, root)]


def read_table(key: str) -> Any:
    """Return a table of the document: ``families``, ``trials`` or ``parts``."""
    return json.loads(DOCUMENT.read_text("utf-8"))[key]


def write_table(key: str, content: Any) -> None:
    """Replace a table of the document, with one row per line."""
    tables = json.loads(DOCUMENT.read_text("utf-8")) | {key: content}
    texts = []
    for name, table in tables.items():
        rows = (
            [f"{json.dumps(row)}: {json.dumps(cells, ensure_ascii=False)}" for row, cells in dict.items(table)]
            if (isinstance(table, dict))
            else []
        )
        texts.append(f'"{name}": ' + ("{\n" + ",\n".join(rows) + "}" if rows else json.dumps(table)))
    DOCUMENT.write_text("{" + ",\n".join(texts) + "}\n", "utf-8")


def rows() -> dict[str, list[str]]:
    """Return the rows of the detailed trials, as family name → cells."""
    return {name: list(cells.values()) for name, cells in read_table("trials").items() if name in BY_NAME}


def main() -> None:
    """Try all families and write the table."""
    outcomes = {}
    for family in FAMILIES:
        with TemporaryDirectory() as place:
            outcomes[family.name] = row_of(family, Path(place))
        print(family.name, *outcomes[family.name], sep="\t", file=sys.stderr)
    write_table("trials", {name: dict(zip(_COLUMNS, cells, strict=True)) for name, cells in outcomes.items()})


if __name__ == "__main__":
    main()
