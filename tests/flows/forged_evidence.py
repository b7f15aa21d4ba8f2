"""Forge a copy of a release. Digests show each change, and so does the recomputed verdict if they are forged, too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from mergegate.merge_core.errors import Refused
from mergegate.tasks.quality.gate.verdict_record import EVIDENCE_RECORD, LIKELIHOODS, OUTCOMES
from mergegate.tasks.release.publish.content import (
    BOM,
    CARD,
    DOCUMENTS,
    FACTS,
    PROVENANCE,
    SIGNATURE,
    SUMS,
    ReleaseFile,
    checksums_text,
    sha256_of,
    variant_evidence,
)
from mergegate.tasks.release.publish.documents.facts import read_facts
from mergegate.tasks.release.publish.documents.release_parts import release_documents
from mergegate.tasks.release.publish.releases.verify import check_release
from mergegate.tasks.release.publish.signing import sign
from mergegate.tasks.release.publish.targets.directory import DirectoryRelease

Columns = dict[str, list[Any]]


def files_of(release: Path) -> list[Path]:
    return [path for path in sorted(release.rglob("*")) if path.is_file()]


def hashes_of(release: Path, *without: str) -> dict[str, str]:
    files = [path for path in files_of(release) if path.name not in without]
    return {path.relative_to(release).as_posix(): sha256_of(path.read_bytes()) for path in files}


def write_sums(release: Path) -> None:
    """Write a SHA256SUMS that matches the files, as a forger would."""
    (release / SUMS).write_text(checksums_text(hashes_of(release, SUMS, SIGNATURE)))


def edit(file: Path, path: str, value: Any) -> None:
    """Replace what stands under a path such as ``a.0.b`` in a JSON file.

    A ``value`` of ``...`` removes it, and a function changes it.
    """
    content = inner = json.loads(file.read_text())
    *way, last = (int(step) if step.isdigit() else step for step in path.split("."))
    for step in way:
        inner = inner[step]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value(inner[last]) if callable(value) else value
    is_sorted = file.parent.name != "evidence"
    file.write_text(json.dumps(content, indent=1, sort_keys=is_sorted, ensure_ascii=False) + "\n")


def edit_provenance(release: Path, path: str, value: Any) -> None:
    """Change the predicate of the provenance."""
    edit(release / PROVENANCE, f"predicate.{path}", value)


def edit_card(release: Path, **fields: object) -> dict[str, Any]:
    """Change the metadata of the card, and return them."""
    _, front, page = (release / CARD).read_text().split("---\n", 2)
    metadata = {**yaml.safe_load(front), **fields}
    (release / CARD).write_text(f"---\n{yaml.safe_dump(metadata)}---\n{page}")
    return metadata


def remove(release: Path, beginning: str) -> None:
    """Remove all files whose names begin like this, and what the bill of materials and the provenance say of them."""

    def without(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [item for item in items if not item["name"].startswith(beginning)]

    for path in files_of(release):
        if path.relative_to(release).as_posix().startswith(beginning):
            path.unlink()
    edit(release / BOM, "components", without)
    edit(release / PROVENANCE, "subject", without)


def forge(release: Path, *changed: str, again: bool = False) -> Path:
    """Update facts, provenance, bill of materials and SHA256SUMS to match the changed files.

    ``again`` writes all documents from the facts, as a forger with mergegate would. The release moves to another name,
    so that its version cannot give the change away.
    """
    if (facts := release / FACTS).exists():
        kept = [name for name in json.loads(facts.read_text())["files"] if (release / name).exists()]
        edit(facts, "files", {name: sha256_of((release / name).read_bytes()) for name in kept})
    if again:
        names = [path.relative_to(release).as_posix() for path in files_of(release)]
        contents = {name: (release / name).read_bytes() for name in names if name not in {*DOCUMENTS, SUMS}}
        files = [ReleaseFile(name, len(data), sha256_of(data), data) for name, data in contents.items()]
        for file in release_documents(read_facts(contents[FACTS]), files):
            (release / file.name).write_bytes(file.read())
        write_sums(release)
        return release.rename(release.with_name("forged"))
    bom = json.loads((release / BOM).read_text())
    files = [part for part in bom["components"] if "hashes" in part]
    for part in files:
        part["hashes"][0]["content"] = sha256_of((release / part["name"]).read_bytes())
    if BOM not in changed:
        (release / BOM).write_text(json.dumps(bom))
    statement = json.loads((release / PROVENANCE).read_text())
    for subject in statement["subject"]:
        subject["digest"]["sha256"] = sha256_of((release / subject["name"]).read_bytes())
    (release / PROVENANCE).write_text(json.dumps(statement))
    write_sums(release)
    return release.rename(release.with_name("forged"))


def numbers(name: str, pattern: str = r"(?<![\w.#])\d+(?:[.,]\d+)*") -> Callable[[Path], list[Callable[[], object]]]:
    """Return the forgeries of a text: the first character of each match of ``pattern`` becomes another."""

    def forgeries(release: Path) -> list[Callable[[], object]]:
        text = (release / name).read_text()
        starts = [match.start() for match in re.finditer(pattern, text)]
        changed = [f"{text[:start]}{'8' if text[start] == '7' else '7'}{text[start + 1 :]}" for start in starts]
        return [partial((release / name).write_text, other) for other in changed]

    return forgeries


def leaves(name: str) -> Callable[[Path], list[Callable[[], object]]]:
    """Return the forgeries of a JSON file: each text or number becomes another."""

    def paths(value: Any, *path: str) -> Iterator[str]:
        children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, child in children:
            yield from paths(child, *path, str(key))
        if not isinstance(value, dict | list) and not any("." in key for key in path):
            yield ".".join(path)

    def other(value: Any) -> Any:
        return value + 1 if isinstance(value, int | float) else f"x{value}"

    def forgeries(release: Path) -> list[Callable[[], object]]:
        return [partial(edit, release / name, path, other) for path in paths(json.loads((release / name).read_text()))]

    return forgeries


def relist(original: Path, release: Path) -> Path:
    """Replace the digest of each file that was changed in a copy, and change nothing else."""
    new: dict[str, str] = {}
    last = (FACTS, BOM, PROVENANCE)
    old = hashes_of(original, SUMS)
    for name in (*(name for name in old if name not in last), *last):
        if name in last:
            text = (release / name).read_text()
            for before, after in new.items():
                text = text.replace(before, after)
            (release / name).write_text(text)
        if (digest := sha256_of((release / name).read_bytes())) != old[name]:
            new[old[name]] = digest
    write_sums(release)
    return release


def sign_release(release: Path, private: Path, name: str = "demo") -> None:
    (release / SIGNATURE).write_text(sign(name, hashes_of(release, SIGNATURE), private))


def refusal_of(release: Path, key: Path | None = None, **options: Any) -> str:
    with pytest.raises(Refused) as refusal:
        check_release(DirectoryRelease(release), key, **options)
    return str(refusal.value)


def require_every_flip_is_found(release: Path, key: Path | None) -> None:
    """Flip bytes at several places of every file. The release is intact before and afterwards."""
    check_release(DirectoryRelease(release), key)
    for path in files_of(release):
        original = path.read_bytes()
        # The last byte of a text may be any whitespace, which has no meaning; in a signature it is not compared.
        last = len(original) - (2 if path.name == SIGNATURE else 1)
        for place in {0, len(original) // 3, len(original) // 2, last}:
            damaged = bytearray(original)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            refusal_of(release, key)
        path.write_bytes(original)
    check_release(DirectoryRelease(release), key)


def require_digest_or_verdict_notices(release: Path) -> None:
    """Require that digests show a changed evidence, and that the verdict does after all digests are forged."""
    assert "sha256 is" in refusal_of(release, recompute=True)
    forged = DirectoryRelease(forge(release))
    check_release(forged)  # All digests agree.
    with pytest.raises(Refused, match=r"does not follow from its outcomes|leads to no verdict"):
        check_release(forged, recompute=True)


@dataclass(frozen=True)
class Evidence:
    """Evidence of one verdict in a release.

    ``model`` is the judged model: 'merge', or the type of a variant.
    """

    release: Path
    model: str = "merge"

    def path(self, name: str) -> Path:
        return self.release / (name if self.model == "merge" else variant_evidence(name, self.model))

    def edit_table(self, name: str, change: Callable[[Columns], object]) -> None:
        """Change the columns of a table."""
        with pq.ParquetFile(self.path(name)) as file:
            table = file.read()
        columns = table.to_pydict()
        change(columns)
        pq.write_table(pa.table(columns, schema=table.schema), self.path(name))

    def edit_record(self, path: str, value: Any) -> None:
        """Change the recorded inputs and verdict of the gate."""
        edit(self.path(EVIDENCE_RECORD), path, value)

    def flip_outcome(self, model: str, task: str = "reverse", at: int = 0) -> None:
        """Flip one outcome of a model on a task."""

        def change(columns: Columns) -> None:
            row = row_of(columns, model, task, at)
            columns["outcome"][row] = 1 - columns["outcome"][row]

        self.edit_table(OUTCOMES, change)


def row_of(columns: Columns, model: str, task: str = "reverse", at: int = 0) -> int:
    """Return the index of a row of a model on a task."""
    rows = range(len(columns["model"]))
    return [row for row in rows if (columns["model"][row], columns["task"][row]) == (model, task)][at]


def flip_one_outcome(evidence: Evidence) -> None:
    evidence.flip_outcome(evidence.model)


def drop_a_document(evidence: Evidence) -> None:
    def change(columns: Columns) -> None:
        doc_id = columns["doc_id"][row_of(columns, evidence.model)]
        rows = range(len(columns["model"]))
        kept = [row for row in rows if (columns["task"][row], columns["doc_id"][row]) != ("reverse", doc_id)]
        columns.update({name: [values[row] for row in kept] for name, values in columns.items()})

    evidence.edit_table(OUTCOMES, change)


def worsen_a_likelihood(evidence: Evidence) -> None:
    def change(columns: Columns) -> None:
        columns["loglik"][columns["model"].index(evidence.model)] -= 1e-6

    evidence.edit_table(LIKELIHOODS, change)


def change_a_prompt(evidence: Evidence) -> None:
    model = "reverser" if evidence.model == "merge" else evidence.model
    zeros = "0" * 64
    evidence.edit_table(OUTCOMES, lambda columns: columns["prompt_hash"].__setitem__(row_of(columns, model), zeros))


def add_an_unknown_model(evidence: Evidence) -> None:
    evidence.edit_table(OUTCOMES, lambda columns: [values.append(values[-1]) for values in columns.values()])


def truncate_the_record(evidence: Evidence) -> None:
    path = evidence.path(EVIDENCE_RECORD)
    path.write_bytes(path.read_bytes()[:-100])


def record(path: str, value: Any) -> Callable[[Evidence], None]:
    return lambda evidence: evidence.edit_record(path, value)


FORGERIES: dict[str, Callable[[Evidence], object]] = {
    "flip an outcome": flip_one_outcome,
    "drop a document": drop_a_document,
    "worsen a likelihood": worsen_a_likelihood,
    "change a prompt": change_a_prompt,
    "add an unknown model": add_an_unknown_model,
    "lower the confidence": record("inputs.plan.rule.confidence", 0.9),
    "raise the drift limit": record("inputs.limits.max_increase", 0.5),
    "state another verdict": record("verdict.publishable", False),
    "remove a guard": record("inputs.guards", lambda guards: guards[:-1]),
    "empty a table": lambda evidence: evidence.path(OUTCOMES).write_bytes(b""),
    "truncate the record": truncate_the_record,
}
