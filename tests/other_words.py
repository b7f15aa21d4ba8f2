"""Verify releases and records of verdicts with a mergegate whose sentences have other words, as a later version has.

The modules that write the files of a release are changed when they are imported, so this runs in a process of its own.
It reverses every word in their sentences.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

_TASKS = "mergegate.tasks"
_WRITERS = (f"{_TASKS}.quality.gate", f"{_TASKS}.release.publish", f"{_TASKS}.merge", f"{_TASKS}.release.report")
# Names of files, and the words by which ``verify`` finds a statement.
_FORMATS = f"{_TASKS}.release.publish.content"


class OtherWords(ast.NodeTransformer):
    """Reverse the words in all texts of at least three words, also in the parts of f-strings."""

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return node if node.arg == "kind" else self.generic_visit(node)  # identifiers of findings

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and node.value.count(" ") >= 2:
            node.value = re.sub(r"(?<![{\w])[^\W\d_]{2,}(?![}\w])", lambda word: word[0][::-1], node.value)
        return node


def use_other_words() -> None:
    """Replace the sentences in all modules that are imported from now on."""
    load = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
        if not name.startswith(_WRITERS) or name == _FORMATS:
            return load(self, name)
        return compile(OtherWords().visit(ast.parse(self.get_data(self.path))), self.path, "exec")

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def read_with_other_words(*directories: Path | str) -> list[dict[str, Any]]:
    """Return the new sentences for each directory, and the differences that mergegate finds with them.

    A directory is a release, or has only the evidence of a verdict.
    """
    command = [sys.executable, __file__, *map(str, directories)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def _read(directory: Path) -> dict[str, Any]:
    """Verify a release with its verdicts, or decide again from evidence. Both fail if the words make a difference."""
    from mergegate.tasks.merge import WeightComparison
    from mergegate.tasks.quality.gate import VerdictRecord, compare_verdicts, decide_again, plain_verdict
    from mergegate.tasks.quality.gate.verdict_record import EVIDENCE_RECORD, EVIDENCE_TABLES
    from mergegate.tasks.release.publish.releases import check_release, recompute
    from mergegate.tasks.release.publish.targets.directory import DirectoryRelease

    here = {**recompute.versions_here(), "mergegate": "another"}
    recompute.versions_here = lambda: here
    provenance, sentences, differences = directory / "provenance.json", list[str](), list[str]()
    if provenance.exists():
        release = check_release(DirectoryRelease(directory), recompute=True)
        recomputed = [each for each in (release.recomputed, *release.variants.values()) if each]
        verdicts = [each.verdict for each in recomputed]
        differences = [str(difference) for each in recomputed for difference in each.rounding]
        if weights := json.loads(provenance.read_text())["predicate"].get("mergegate_weights"):
            sentences.append(WeightComparison.model_validate(weights).sentences([f"m{index}" for index in range(9)]))
    else:
        record = VerdictRecord.model_validate(json.loads((directory / EVIDENCE_RECORD).read_text()))
        tables = {name: directory / name for name in EVIDENCE_TABLES if (directory / name).exists()}
        verdicts = [decide_again(record, tables)]
        differences = list(map(str, compare_verdicts(record.verdict, plain_verdict(verdicts[0]))))
    for verdict in verdicts:
        sentences += [*verdict.reasons, *verdict.notes, *(guard.reason for guard in verdict.all_guards)]
    return {"sentences": sentences, "differences": differences}


if __name__ == "__main__":
    use_other_words()
    for argument in sys.argv[1:]:
        print(json.dumps(_read(Path(argument))))
