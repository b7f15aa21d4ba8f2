"""Print the size of each package of the product, which ``tests/budget.toml`` limits: ``python tools/sizes.py``."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WINGS = ("base", "models", "quality", "release")  # folders of packages in tasks/
_IMPORTS = re.compile(r"^ *(?:from [\w.]+ )?import (?:\([^)]*\)|.*)$", re.MULTILINE)
_CLASSES = re.compile(r"^ *class \w+[(:]", re.MULTILINE)


def size_of_product() -> dict[str, list[int]]:
    """Return the lines, files, classes and lines of imports of each package."""
    sizes: dict[str, list[int]] = {}
    for layer in ("merge_core", "tasks", "flows", "mergegate"):
        for path in (ROOT / layer).rglob("*.py"):
            inner = path.relative_to(ROOT).parts
            text = path.read_text()
            imports = sum(statement.count("\n") + 1 for statement in _IMPORTS.findall(text))
            own = (text.count("\n"), 1, len(_CLASSES.findall(text)), imports)
            depth = 3 if inner[0] == "tasks" and inner[1] in WINGS and len(inner) > 3 else 2
            package = "/".join(inner[:depth]) if len(inner) > 2 else layer
            sizes[package] = [a + b for a, b in zip(sizes.get(package, [0] * 4), own, strict=True)]
    return sizes


if __name__ == "__main__":
    for package, size in sorted(size_of_product().items()):
        print(f'"{package}" = {size}')
