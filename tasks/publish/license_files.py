"""What a release ships because the licences of its parents ask for it: texts, notices, and what was changed.

``LICENSE`` holds the text of the licence that the weights are under, or of all of them one after another;
``licenses/<identifier>.txt`` each text that must travel along; ``licenses/<model>.txt`` the file that lies beside a
parent or an ancestor, with its copyright lines; ``NOTICE`` the sentences that must stand there word for word, and the
parents' own; ``MODIFICATIONS`` that files were changed. A text that is nowhere to be had is an open obligation.
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
    """A licence file that lies beside a model."""

    model: str
    license: str  # identifier that the model is under
    file: str
    text: str


def license_files(parents: Sequence[PinnedCheckpoint], verdict: LicenseVerdict) -> tuple[ReleaseFile, ...]:
    """The files for the licences of a release, each name once; the same inputs give the same bytes."""
    own = tuple(_own_files(parents, verdict))
    files: dict[str, str] = {}
    if text := _license(own, verdict):
        files[LICENSE] = text
    for item in verdict.combination.obligations:
        if item.kind == "text" and item.model is None:
            for identifier in item.because:
                for name, text in _shipped(identifier).items():
                    files[f"licenses/{_file_name(name)}.txt"] = text
    for one in own:
        _add(files, f"licenses/{_file_name(one.model)}", one)
    if notice := _notice(parents, verdict):
        files[NOTICE] = notice
    if any(item.kind == "changes" for item in verdict.combination.obligations):
        files[MODIFICATIONS] = _modifications(parents)
    return tuple(written_file(name, text) for name, text in files.items())


def open_obligations(parents: Sequence[PinnedCheckpoint], verdict: LicenseVerdict) -> tuple[Obligation, ...]:
    """What the release asks for and ``license_files`` cannot make: texts that are neither shipped with mergegate nor
    lie beside a model under them. Somebody has to add them by hand."""
    own = tuple(_own_files(parents, verdict))
    asked = [item for item in verdict.combination.obligations if item.kind == "text"]
    # The weights may be under a licence that no parent asks to be shipped; one that is not known is asked for by model.
    named = {identifier for item in asked for identifier in item.because}
    carried = [
        Obligation(kind="text", text=f"ship the text of {identifier}", because=(identifier,))
        for identifier in verdict.combination.licenses
        if identifier not in named and _is_known(identifier)
    ]
    return tuple(item for item in (*asked, *carried) if not _fulfilled(item, own))


def _fulfilled(item: Obligation, own: Sequence[_LicenseFileOfModel]) -> bool:
    if item.model is not None:
        return any(one.model == item.model for one in own)
    return all(
        bool(_shipped(identifier)) or any(one.license == identifier for one in own) for identifier in item.because
    )


def _is_known(identifier: str) -> bool:
    entry = load_table().licenses.get(identifier)
    return entry is None or entry.resolved


def _shipped(identifier: str) -> dict[str, str]:
    entry = load_table().licenses.get(identifier)  # a licence that a profile adds has no text here
    return license_texts(entry) if entry else {}


def _own_files(parents: Sequence[PinnedCheckpoint], verdict: LicenseVerdict) -> Iterator[_LicenseFileOfModel]:
    for parent in parents:
        for name, directory in _places(parent):
            for file in _files(directory, LICENSE_FILE):
                yield _LicenseFileOfModel(name, verdict.licenses[name], file.name, _read(file))
    for ancestor in verdict.ancestors:
        if ancestor.own_text:
            yield _LicenseFileOfModel(ancestor.name, ancestor.license, LICENSE, ancestor.own_text)


def _places(parent: PinnedCheckpoint) -> tuple[tuple[str, Path], ...]:
    """Name and directory of a parent, and of the adapter that is applied to it."""
    own = (parent.name, parent.directory)
    return (own, (parent.adapter.ref, parent.adapter.directory)) if parent.adapter else (own,)


def _files(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    return sorted(file for file in directory.iterdir() if pattern.fullmatch(file.name) and file.is_file())


def _read(file: Path) -> str:
    return read_plain(file, _MAX_TEXT_BYTES).decode(errors="replace")


def _license(own: Sequence[_LicenseFileOfModel], verdict: LicenseVerdict) -> str:
    """The texts of all licences that the weights are under; under headings where there are several."""
    parts: dict[str, str] = {}
    for identifier in verdict.combination.licenses:
        parts |= _texts_of(identifier, own, verdict)
    if len(parts) == 1:
        return next(iter(parts.values()))
    return "\n\n".join(f"{_RULE}\n{name}\n{_RULE}\n\n{text.strip()}\n" for name, text in parts.items())


def _texts_of(identifier: str, own: Sequence[_LicenseFileOfModel], verdict: LicenseVerdict) -> dict[str, str]:
    """Text by heading. A file beside a model says whose copyright it is and which edition, so it comes first."""
    table = load_table()
    entry = table.licenses.get(identifier)
    if entry is not None and entry.resolved:
        same = {
            one.text for one in own if one.license == identifier and identify_license(one.text, table, entry) == entry
        }
        if len(same) == 1 and not entry.texts:
            return {identifier: same.pop()}
        if shipped := license_texts(entry):
            return shipped
    asked = {item.model for item in verdict.combination.obligations if item.model is not None}
    known = _is_known(identifier)
    beside = [one for one in own if (one.license == identifier if known else one.model in asked)]
    return {f"{one.model}: {one.file}": one.text for one in beside}


def _notice(parents: Sequence[PinnedCheckpoint], verdict: LicenseVerdict) -> str:
    sentences = [item.text for item in verdict.combination.obligations if item.kind == "notice"]
    parts = ["\n".join(sentences)] if sentences else []
    parts += [
        f"Notice of {name}:\n\n{_read(file).strip()}"
        for parent in parents
        for name, directory in _places(parent)
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


def _add(files: dict[str, str], stem: str, one: _LicenseFileOfModel) -> None:
    """Add a model's own file under a name that is still free; the same text under the same name stands there once."""
    candidates = [f"{stem}.txt", f"{stem}--{one.file}.txt", *(f"{stem}--{number}.txt" for number in range(2, 1000))]
    name = next(name for name in candidates if files.get(name, one.text) == one.text)
    files[name] = one.text


def _file_name(name: str) -> str:
    """A name that any file system and any URL takes, made of what a stranger called a model."""
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "--", name).strip(".-")
    return plain[:_LONGEST_NAME] or "model"
