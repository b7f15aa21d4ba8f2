"""Read the front matter of a model card with huggingface_hub's own pattern.

This is the only reader of ``README.md``. Cards are untrusted input, so reading a card never raises. If a card cannot be
parsed completely, its ``problem`` says why. The license check reports that as a doubt, not as a missing license.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import StrictLoader, open_plain, parse_yaml
from mergegate.merge_core.recipe import step_in_name

CARD_FILE = "README.md"
NO_CARD = f"there is no {CARD_FILE}"
NO_FRONT_MATTER = f"{CARD_FILE} has no front matter"
_MAX_BYTES = 1 << 20
# Fields that determine the permitted uses of a merge.
_LICENSE_FIELD = re.compile(r"(licen[cs]e(_name|_link)?|base_model)[ \t]*:", re.IGNORECASE)
# PEFT, axolotl or LLaMA-Factory write one of these if an adapter was trained on a quantized base.
_QUANTIZED = re.compile(
    r"quantization config was used|load_in_[48]bit\"?: *true|adapter: *qlora|quantization_bit: *[1-8]", re.IGNORECASE
)
_YAML_LINE = re.compile(r"[\w\"'-]+[ \t]*:|[ \t]+\S|-[ \t]|#|\s*$")


@dataclass(frozen=True)
class ModelCard:
    """Front matter of a model card."""

    # Fields of the front matter. Keys may have other types than text: YAML reads ``no:`` as a boolean.
    metadata: Mapping[object, object] = field(default_factory=dict)
    # `NO_CARD` or `NO_FRONT_MATTER` if there is no metadata and none is hidden elsewhere in the card. Empty in all
    # other cases.
    absence: str = ""
    problem: str = ""  # Reason why the metadata could not be read completely, or empty.

    @property
    def fields(self) -> dict[str, object]:
        """Metadata with every key as text."""
        return {str(name): value for name, value in self.metadata.items()}


class _CardLoader(StrictLoader):
    """YAML loader for plain data that also accepts keys that are not text."""

    text_keys = False


def read_card(directory: Path) -> ModelCard:
    """Return the card of the model in `directory`. This function never raises."""
    try:
        path = card_path(directory)
        if path is None:
            return ModelCard(absence=NO_CARD)
        with open_plain(path, within=directory) as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        if os.path.lexists(directory / CARD_FILE):
            return ModelCard(problem=f"{CARD_FILE} is a link to a file that does not exist")
        return ModelCard(absence=NO_CARD)
    except (InvalidInput, OSError) as error:
        reason = error.found if isinstance(error, InvalidInput) else type(error).__name__
        return ModelCard(problem=f"{CARD_FILE} cannot be read: {reason}")
    return parse_card(content)


def quantization_in_card(directory: Path) -> str:
    """Return the words with which the card in `directory` says that an adapter's base was quantized, or nothing."""
    with suppress(InvalidInput, OSError), open_plain(card_path(directory) or directory, within=directory) as file:
        match = _QUANTIZED.search(file.read(_MAX_BYTES).decode(errors="replace"))
        return match[0] if match else ""
    return ""


def card_path(directory: Path) -> Path | None:
    """Return the path of ``README.md``, or of the first file whose name differs from it only in letter case, or None.

    Raises:
        OSError: `directory` cannot be listed.
    """
    if os.path.lexists(directory / CARD_FILE):
        return directory / CARD_FILE
    return next((path for path in sorted(directory.iterdir()) if path.name.lower() == CARD_FILE.lower()), None)


def card_directory(model: Path) -> Path:
    """Return the directory whose card and license file apply to the local model in ``model``.

    This is ``model``, or the directory of the training run that contains it: trainers write one card for the whole run,
    and PEFT writes cards without a license. A model counts as a checkpoint of a run if its trainer has stored its state
    with it, or if its name contains a step.
    """
    is_checkpoint = (model / "trainer_state.json").exists() or step_in_name(model.name) is not None
    with suppress(OSError):
        if is_checkpoint and card_path(model.resolve().parent) is not None:
            own = read_card(model)
            is_silent = own.metadata.get("library_name") == "peft" and not own.metadata.get("license")
            if own.absence == NO_CARD or (is_silent and not own.problem):
                return model.resolve().parent
    return model


def parse_card(content: bytes) -> ModelCard:
    """Return the card in the first MiB of `content`. This function never raises."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    is_cut = len(content) > _MAX_BYTES
    text = content[:_MAX_BYTES].removeprefix(codecs.BOM_UTF8).decode(errors="replace")
    # The library's ``metadata_load`` reads with universal newlines, its ``ModelCard.load`` without them.
    unified = _with_newlines(text)
    block = REGEX_YAML_BLOCK.search(unified)
    raw_block = REGEX_YAML_BLOCK.search(text)
    if is_cut and (block is None or block.end() == len(unified)):
        return ModelCard(problem=f"the front matter of {CARD_FILE} does not end within {_MAX_BYTES} bytes")
    if block is None:
        if "\0" in text:
            return ModelCard(problem=f"{CARD_FILE} is not UTF-8 text")
        if _is_fence(unified.lstrip().partition("\n")[0]) or _has_stray_block(unified):
            return ModelCard(problem=f"{CARD_FILE} has a '---' block that cannot be read as front matter")
        return ModelCard(absence=NO_FRONT_MATTER)
    if raw_block is not None and _with_newlines(raw_block[2]) != block[2]:
        return ModelCard(problem=f"the end of the front matter of {CARD_FILE} depends on how line breaks are read")
    try:
        documents = parse_yaml(block[2], CARD_FILE, "the front matter of a card", loader=_CardLoader)
    except InvalidInput as error:
        return ModelCard(problem=f"the front matter of {CARD_FILE} is not valid YAML: {error.found}")
    if len(documents) > 1:
        return ModelCard(problem=f"the front matter of {CARD_FILE} has {len(documents)} YAML documents, not one")
    metadata = documents[0] if documents else {}
    if not isinstance(metadata, dict):
        return ModelCard(problem=f"the front matter of {CARD_FILE} is a {type(metadata).__name__}, not a mapping")

    if metadata.get("license"):
        return ModelCard(metadata)
    # The author may have written the license outside the field that the Hub reads.
    problem = ""
    if _has_stray_block(unified[block.end() :]):
        problem = f"{CARD_FILE} has a second '---' block, which the Hub does not read as front matter"
    for name in metadata:
        if name != "license" and isinstance(name, str) and name.strip().lower() in ("license", "licence"):
            field = name.strip()
            problem = f"the front matter of {CARD_FILE} has the field {field:.20}; the Hub reads only 'license'"
            break
    return ModelCard(metadata, problem=problem)


def _with_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _is_fence(line: str) -> bool:
    """Return whether `line` is ``---``, apart from blanks and invisible or undecodable characters."""
    return line.strip(" \t\ufeff\u200b\ufffd") == "---"


def _has_stray_block(text: str) -> bool:
    """Return whether `text` has a ``---`` line followed by YAML that names a license or a base model."""
    in_block = False
    for line in text.splitlines():
        if _is_fence(line):
            in_block = True
        elif in_block and _LICENSE_FIELD.match(line):
            return True
        elif not _YAML_LINE.match(line):
            in_block = False
    return False
