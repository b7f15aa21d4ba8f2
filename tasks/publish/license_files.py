"""Collect the files that a release must include under the licenses of its parents.

* ``LICENSE``: the text of the license of the weights, or of all of them one after another.
* ``licenses/<identifier>.txt``: a license text that must accompany the weights.
* ``licenses/<model>.txt``: the license file of a parent or an ancestor, with its copyright lines.
* ``NOTICE``: sentences that must be reproduced verbatim, and the parents' own notices.
* ``MODIFICATIONS``: a statement that files were changed.

A text that is not available is an open obligation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergegate.merge_core.parsing import read_plain
from mergegate.tasks.checkpoints import PinnedCheckpoint
from mergegate.tasks.preflight.licenses import (
    LICENSE_FILE,
    LicenseVerdict,
    Obligation,
    identify_license,
    license_texts,
    load_table,
)
from mergegate.tasks.publish.content import ReleaseFile, written_file

LICENSE = "LICENSE"
NOTICE = "NOTICE"
MODIFICATIONS = "MODIFICATIONS"
_NOTICE_FILE = re.compile(r"notice(\.(md|txt|rst))?", re.IGNORECASE)
_RULE = "=" * 80
_LONGEST_NAME = 100
_MAX_TEXT_BYTES = 16 << 20


@dataclass(frozen=True)
class _LicenseFileOfModel:
    """A license file that comes with a model."""

    model: str
    license: str  # identifier of the model's license
    file: str
    text: str


def license_files(parents: Sequence[PinnedCheckpoint], verdict: LicenseVerdict) -> tuple[ReleaseFile, ...]:
    """Return the license files of a release, with unique names. The result is deterministic."""
    own = tuple(_own_files(parents, verdict))
    files: dict[str, str] = {}
    if text := _license(own, verdict):
        files[LICENSE] = text
    for item in verdict.combination.obligations:
        if item.kind == "text" and item.model is None:
            for identifier in item.because:
                for name, text in _shipped(identifier).items():
                    files[f"licenses/{_file_name(name)}.txt"] = text
    for file in own:
        _add(files, f"licenses/{_file_name(file.model)}", file)
    if notice := _notice(parents, verdict):
        files[NOTICE] = notice
    if any(item.kind == "changes" for item in verdict.combination.obligations):
        files[MODIFICATIONS] = _modifications(parents)
    return tuple(written_file(name, text) for name, text in files.items())


def open_obligations(parents: Sequence[PinnedCheckpoint], verdict: LicenseVerdict) -> tuple[Obligation, ...]:
    """Return the obligations that ``license_files`` cannot fulfill.

    These are texts that are neither shipped with mergegate nor included with a model. A user must add them by hand.
    """
    own = tuple(_own_files(parents, verdict))
    required = [item for item in verdict.combination.obligations if item.kind == "text"]
    # The weights may be under a license whose text no parent requires. An unknown license is required by model.
    identifiers = {identifier for item in required for identifier in item.because}
    additional = [
        Obligation(kind="text", text=f"ship the text of {identifier}", because=(identifier,))
        for identifier in verdict.combination.licenses
        if identifier not in identifiers and _is_known(identifier)
    ]
    return tuple(item for item in (*required, *additional) if not _fulfilled(item, own))


def _fulfilled(item: Obligation, own: Sequence[_LicenseFileOfModel]) -> bool:
    if item.model is not None:
        return any(file.model == item.model for file in own)
    return all(
        bool(_shipped(identifier)) or any(file.license == identifier for file in own) for identifier in item.because
    )


def _is_known(identifier: str) -> bool:
    entry = load_table().licenses.get(identifier)
    return entry is None or entry.resolved


def _shipped(identifier: str) -> dict[str, str]:
    entry = load_table().licenses.get(identifier)  # a license that a profile adds has no text in the table
    return license_texts(entry) if entry else {}


def _own_files(parents: Sequence[PinnedCheckpoint], verdict: LicenseVerdict) -> Iterator[_LicenseFileOfModel]:
    for parent in parents:
        for name, directory in _model_directories(parent):
            for file in _files(directory, LICENSE_FILE):
                yield _LicenseFileOfModel(name, verdict.licenses[name], file.name, _read(file))
    for ancestor in verdict.ancestors:
        if ancestor.own_text:
            yield _LicenseFileOfModel(ancestor.name, ancestor.license, LICENSE, ancestor.own_text)


def _model_directories(parent: PinnedCheckpoint) -> tuple[tuple[str, Path], ...]:
    """Return name and directory of a parent, and of the adapter that is applied to it."""
    own = (parent.name, parent.directory)
    return (own, (parent.adapter.ref, parent.adapter.directory)) if parent.adapter else (own,)


def _files(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    return sorted(file for file in directory.iterdir() if pattern.fullmatch(file.name) and file.is_file())


def _read(file: Path) -> str:
    return read_plain(file, _MAX_TEXT_BYTES).decode(errors="replace")


def _license(own: Sequence[_LicenseFileOfModel], verdict: LicenseVerdict) -> str:
    """Return the texts of all licenses of the weights, with headings if there are several."""
    parts: dict[str, str] = {}
    for identifier in verdict.combination.licenses:
        parts |= _texts_of(identifier, own, verdict)
    if len(parts) == 1:
        return next(iter(parts.values()))
    return "\n\n".join(f"{_RULE}\n{name}\n{_RULE}\n\n{text.strip()}\n" for name, text in parts.items())


def _texts_of(identifier: str, own: Sequence[_LicenseFileOfModel], verdict: LicenseVerdict) -> dict[str, str]:
    """Return license texts by heading. A model's own file, which names copyright holder and edition, comes first."""
    table = load_table()
    entry = table.licenses.get(identifier)
    if entry is not None and entry.resolved:
        matching = {
            file.text
            for file in own
            if file.license == identifier and identify_license(file.text, table, entry) == entry
        }
        if len(matching) == 1 and not entry.texts:
            return {identifier: matching.pop()}
        if shipped := license_texts(entry):
            return shipped
    models = {item.model for item in verdict.combination.obligations if item.model is not None}
    is_known = _is_known(identifier)
    included = [file for file in own if (file.license == identifier if is_known else file.model in models)]
    return {f"{file.model}: {file.file}": file.text for file in included}


def _notice(parents: Sequence[PinnedCheckpoint], verdict: LicenseVerdict) -> str:
    sentences = [item.text for item in verdict.combination.obligations if item.kind == "notice"]
    parts = ["\n".join(sentences)] if sentences else []
    parts += [
        f"Notice of {name}:\n\n{_read(file).strip()}"
        for parent in parents
        for name, directory in _model_directories(parent)
        for file in _files(directory, _NOTICE_FILE)
    ]
    return "\n\n".join(parts) + "\n" if parts else ""


def _modifications(parents: Sequence[PinnedCheckpoint]) -> str:
    names = "\n".join(f"  {parent.ref}" for parent in parents)
    return (
        "The files of this model are not those of any model that it was made from.\n\n"
        f"Its weights were computed by merging the weights of\n\n{names}\n\n"
        "as recipe.yaml says; no weight file of theirs is among them. Configuration and tokenizer files were written\n"
        "anew or adapted. provenance.json names the exact inputs.\n"
    )


def _add(files: dict[str, str], stem: str, file: _LicenseFileOfModel) -> None:
    """Add a model's file under a name that is not taken. The same text is not added twice under the same name."""
    candidates = [f"{stem}.txt", f"{stem}--{file.file}.txt", *(f"{stem}--{number}.txt" for number in range(2, 1000))]
    name = next(name for name in candidates if files.get(name, file.text) == file.text)
    files[name] = file.text


def _file_name(name: str) -> str:
    """Return a file name that is safe on any file system and in any URL, for an untrusted model name."""
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "--", name).strip(".-")
    return plain[:_LONGEST_NAME] or "model"
