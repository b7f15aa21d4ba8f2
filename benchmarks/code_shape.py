"""Measure the shape of the product's code: lines, functions, functions referenced once, small files, long signatures.

Run ``python benchmarks/code_shape.py`` in the root of the repository. A function counts as referenced once if its name
occurs once in ``flows/``, ``tasks/`` and ``merge_core/``, apart from its definition. Special methods do not count.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

LAYERS = ("flows", "tasks", "merge_core")
SMALL_FILE = 60  # lines
MOST_PARAMETERS = 6


def main() -> None:
    """Print one row per measure."""
    files = [file for layer in LAYERS for file in sorted(Path(layer).rglob("*.py"))]
    lines = {file: len(file.read_text().splitlines()) for file in files}
    functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
    names: Counter[str] = Counter()
    docstring_lines = 0
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(node)
            elif isinstance(node, ast.Name):
                names[node.id] += 1
            elif isinstance(node, ast.Attribute):
                names[node.attr] += 1
            elif (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                docstring_lines += (node.end_lineno or node.lineno) - node.lineno + 1
    once = [node for node in functions if names[node.name] == 1 and not node.name.startswith("__")]
    small = [file for file in files if lines[file] <= SMALL_FILE]
    fronts = [file for file in small if file.name == "__init__.py"]
    long_signatures = [
        node
        for node in functions
        if len({arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)} - {"self", "cls"}) > MOST_PARAMETERS
    ]
    rows = {
        "lines": f"{sum(lines.values()):,} in {len(files)} files",
        "lines of docstrings": f"{docstring_lines:,}",
        "functions": f"{len(functions):,}",
        "functions referenced once": f"{len(once):,} ({len(once) / len(functions):.1%})",
        f"files of at most {SMALL_FILE} lines": f"{len(small)}, including {len(fronts)} __init__.py",
        f"functions with more than {MOST_PARAMETERS} parameters": f"{len(long_signatures)}",
    }
    for label, value in rows.items():
        print(f"{label:40} {value}")


if __name__ == "__main__":
    main()
