"""Execute the code cells of a notebook in order inside a running event loop, as Jupyter does, and print their outputs.

::

    python notebook_cells.py NOTEBOOK.ipynb

The program prints a JSON list with one item per code cell: the output as text, in the form of a stored output.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import sys
from pathlib import Path
from typing import Any


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    """Return the code cells of a notebook."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


async def execute(notebook: Path) -> list[str]:
    """Execute all code cells in one namespace, and return the output of each: what it prints, then its last value."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, cell in enumerate(code_cells(notebook)):
        tree = ast.parse("".join(cell["source"]), f"cell {number}")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            for part, mode in ((tree, "exec"), (last and ast.Expression(last.value), "eval")):
                if part is None:
                    continue
                code = compile(part, f"cell {number}", mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                value = eval(code, namespace)
                value = await value if inspect.iscoroutine(value) else value
                if value is not None:
                    print(repr(value))
                    if html := getattr(value, "_repr_html_", None):
                        assert html().startswith("<")
        outputs.append(printed.getvalue())
        await asyncio.sleep(0)  # the loop still works
    return outputs


if __name__ == "__main__":
    print(json.dumps(asyncio.run(execute(Path(sys.argv[1])))))
