"""Collect the files that a release must include under the licenses of its parents.

* ``LICENSE``: the text of the license of the weights. If there are several licenses, all texts with headings.
* ``licenses/<identifier>.txt``: a license text that must accompany the weights.
* ``licenses/<model>.txt``: the license file of a parent or an ancestor, with its copyright lines.
* ``NOTICE``: sentences that must be reproduced verbatim, and the parents' own notices.
* ``MODIFICATIONS``: a statement that files were changed.

A required text that is not available becomes an open obligation (see ``open_obligations``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mergegate.merge_core.parsing import read_plain
from mergegate.tasks.merge import WeightComparison, describe_changes
from mergegate.tasks.models.checkpoints import PinnedCheckpoint, card_directory
from mergegate.tasks.preflight.licenses import (
    LICENSE_FILE,
    LicenseVerdict,
    Obligation,
    identify_license,
    license_texts,
    load_table,
)
from mergegate.tasks.release.publish.content import MODIFICATIONS, ReleaseFile, written_file

_LICENSE = "LICENSE"
_NOTICE_FILE = re.compile(r"notice(\.(md|txt|rst))?", re.IGNORECASE)
_RULE = "=" * 80
_MAX_NAME_LENGTH = 100
_MAX_TEXT_BYTES = 16 << 20


@dataclass(frozen=True)
class _ModelLicenseFile:
    """License file in the directory of a parent, or license text of an ancestor."""

    model: str
    license: str  # identifier of the model's license
    file: str
    text: str


def license_files(
    parents: Sequence[PinnedCheckpoint],
    verdict: LicenseVerdict,
    *,
    weights: WeightComparison | None = None,
    quantized_from: str = "",
) -> tuple[ReleaseFile, ...]:
    """Return the license files of a release, with unique names.

    ``weights`` compares the merge with its parents. None: the weights were not compared. ``quantized_from`` names the
    release of the merge, if the weights are quantized variants of it.
    """
    own_files = tuple(_own_files(parents, verdict))
    obligations = verdict.combination.obligations
    files = {_LICENSE: text} if (text := _license_text(own_files, verdict)) else {}
    files |= shipped_files(verdict)
    for file in own_files:
        # Use the first name that is not taken. The same text is not added twice under the same name.
        stem = f"licenses/{_file_name(file.model)}"
        suffixes = ("", f"--{file.file}", *(f"--{number}" for number in range(2, 1000)))
        candidates = (f"{stem}{suffix}.txt" for suffix in suffixes)
        files[next(name for name in candidates if files.get(name, file.text) == file.text)] = file.text
    sentences = [item.text for item in obligations if item.kind == "notice"]
    notices = ["\n".join(sentences)] if sentences else []
    notices += [
        f"Notice of {name}:\n\n{text.strip()}"
        for parent in parents
        for name, _, text in _texts_of_parent(parent, _NOTICE_FILE)
    ]
    if notices:
        files["NOTICE"] = "\n\n".join(notices) + "\n"
    if any(item.kind == "changes" for item in obligations):
        refs = [" ".join(parent.ref.split()) for parent in parents]  # A line break in a name would add lines.
        names = "\n".join(f"  {ref}" for ref in refs)
        work = "computed with recipe.yaml by merging"
        if quantized_from:
            work = f"quantized from {quantized_from}, which was computed by merging"
        files[MODIFICATIONS] = (
            f"The weights of this model were {work} the weights of\n\n{names}\n\n"
            f"{describe_changes(weights, refs)}\n\n"
            "Configuration and tokenizer files were copied or adapted. provenance.json identifies the exact inputs.\n"
        )
    return tuple(written_file(name, text) for name, text in files.items())


def shipped_files(verdict: LicenseVerdict) -> dict[str, str]:
    """Return the license texts that come with mergegate and that obligations name, by the name of their file."""
    required = [item for item in verdict.combination.obligations if item.kind == "text" and item.model is None]
    texts = [_shipped_texts(identifier) for item in required for identifier in item.because]
    return {f"licenses/{_file_name(name)}.txt": text for each in texts for name, text in each.items()}


def open_obligations(parents: Sequence[PinnedCheckpoint], verdict: LicenseVerdict) -> tuple[Obligation, ...]:
    """Return the obligations that ``license_files`` cannot fulfill.

    These require texts that come neither with mergegate nor with a model. A user must add them to the release.
    """
    own_files = tuple(_own_files(parents, verdict))
    required = [item for item in verdict.combination.obligations if item.kind == "text"]
    # The weights may be under a license whose text no obligation requires. The obligation for an unknown license names
    # the model instead of the license.
    identifiers = {identifier for item in required for identifier in item.because}
    required += [
        Obligation(kind="text", text=f"ship the text of {identifier}", because=(identifier,))
        for identifier in verdict.combination.licenses
        if identifier not in identifiers and _is_known(identifier)
    ]
    models, own_licenses = {file.model for file in own_files}, {file.license for file in own_files}
    return tuple(
        item
        for item in required
        if (
            item.model not in models
            if item.model is not None
            else any(name not in own_licenses and not _shipped_texts(name) for name in item.because)
        )
    )


def _is_known(identifier: str) -> bool:
    entry = load_table().licenses.get(identifier)
    return entry is None or entry.resolved


def _shipped_texts(identifier: str) -> dict[str, str]:
    entry = load_table().licenses.get(identifier)  # a license that a profile adds has no text in the table
    return license_texts(entry) if entry else {}


def _own_files(parents: Sequence[PinnedCheckpoint], verdict: LicenseVerdict) -> Iterator[_ModelLicenseFile]:
    for parent in parents:
        for name, file, text in _texts_of_parent(parent, LICENSE_FILE):
            yield _ModelLicenseFile(name, verdict.licenses[name], file, text)
    for ancestor in verdict.ancestors:
        if ancestor.own_text:
            yield _ModelLicenseFile(ancestor.name, ancestor.license, _LICENSE, ancestor.own_text)


def _texts_of_parent(parent: PinnedCheckpoint, pattern: re.Pattern[str]) -> Iterator[tuple[str, str, str]]:
    """Yield model, file name and text of each matching file of a parent and of its adapter."""
    models = [(parent.name, parent.directory)]
    if parent.adapter:
        models.append((parent.adapter.ref, parent.adapter.directory))
    for name, directory in models:
        for file in sorted(card_directory(directory).iterdir()):
            if pattern.fullmatch(file.name) and file.is_file():
                yield name, file.name, read_plain(file, _MAX_TEXT_BYTES).decode(errors="replace")


def _license_text(own_files: Sequence[_ModelLicenseFile], verdict: LicenseVerdict) -> str:
    """Return the texts of all licenses of the weights, with headings if there are several."""
    table = load_table()
    models = {item.model for item in verdict.combination.obligations if item.model is not None}
    texts: dict[str, str] = {}
    for identifier in verdict.combination.licenses:
        entry = table.licenses.get(identifier)
        if entry is not None and entry.resolved:
            # A model's own file, which names copyright holder and edition, comes before a shipped text.
            matching = {
                file.text
                for file in own_files
                if file.license == identifier and identify_license(file.text, table, entry) == entry
            }
            if len(matching) == 1 and not entry.texts:
                texts[identifier] = matching.pop()
                continue
            if shipped := license_texts(entry):
                texts |= shipped
                continue
        is_known = _is_known(identifier)
        included = [file for file in own_files if (file.license == identifier if is_known else file.model in models)]
        texts |= {f"{file.model}: {file.file}": file.text for file in included}
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "\n\n".join(f"{_RULE}\n{name}\n{_RULE}\n\n{text.strip()}\n" for name, text in texts.items())


def _file_name(name: str) -> str:
    """Convert an untrusted model name to a file name that is safe on any file system and in any URL."""
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "--", name).strip(".-")
    return plain[:_MAX_NAME_LENGTH] or "model"
