"""Load the prompts that both models answer: a jsonl file or MT-Bench's questions, pinned by content.

A line is ``{"prompt": "…"}`` or ``{"turns": ["…", "…"]}``. Optional keys are ``id`` (or MT-Bench's ``question_id``),
``category`` and ``reference``, which is a text or a list with one text per turn. MT-Bench has its reference answers
in a second file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import MAX_DATA_BYTES, line_location, parse_line, plain_file, read_plain
from mergegate.tasks.judge.settings import JudgeSettings
from mergegate.tasks.store import NotInKey


class Prompts(BaseModel):
    """File of prompts pinned by content, and the size and seed of the sample."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[Path, NotInKey]
    sha256: str
    sample: int | None = None
    seed: int = 0


class References(BaseModel):
    """File of reference answers pinned by content. They affect judgments, not answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[Path, NotInKey]
    sha256: str


class JudgePrompts(NamedTuple):
    """Prompts and reference answers of one run."""

    prompts: Prompts
    references: References | None


@dataclass(frozen=True)
class Prompt:
    """One conversation: the user's messages, turn by turn."""

    id: str
    turns: tuple[str, ...]
    references: tuple[str | None, ...]  # As many as turns.
    category: str = ""


def pin_prompts(settings: JudgeSettings, root: Path, hashes: HashMemo) -> JudgePrompts:
    """Return the prompts and reference answers with their sha256. Relative paths are relative to ``root``.

    Raises:
        InvalidInput: If a file is missing or malformed.
    """

    def pin(file: Path, field: str) -> tuple[Path, str]:
        path = (root / file).absolute()
        try:
            plain_file(path, most=MAX_DATA_BYTES)
        except FileNotFoundError:
            raise InvalidInput(
                f"judge.{field}: {file}", found="no such file", expected="jsonl, relative to the profile"
            ) from None
        return path, hashes.sha256(path)

    path, sha256 = pin(settings.prompts, "prompts")
    prompts = Prompts(path=path, sha256=sha256, sample=settings.sample, seed=settings.seed)
    references = None
    if settings.references is not None:
        path, sha256 = pin(settings.references, "references")
        references = References(path=path, sha256=sha256)
    read_prompts(prompts, references)  # Validate now rather than after hours of merging and evaluating.
    return JudgePrompts(prompts, references)


def read_prompts(prompts: Prompts, references: References | None = None) -> tuple[Prompt, ...]:
    """Return the selected prompts in the order of the file.

    Prompts are sampled in the order of a hash, so a larger sample contains every smaller one.

    Raises:
        InvalidInput: If a file changed after it was pinned, or a line is malformed.
    """
    by_id: dict[str, Prompt] = {}
    for location, line in _lines(prompts.path, prompts.sha256):
        if ("prompt" in line) == ("turns" in line):
            problem = "both prompt and turns" if "prompt" in line else "neither prompt nor turns"
            raise InvalidInput(location, found=problem, expected="a text under prompt, or a list of texts under turns")
        turns = (line["prompt"],) if "prompt" in line else line["turns"]
        if not (isinstance(turns, (list, tuple)) and turns and all(isinstance(t, str) and t.strip() for t in turns)):
            raise InvalidInput(
                location, found=f"{turns!r:.80}", expected="a text under prompt, or a list of texts under turns"
            )
        reference = line.get("reference")
        by_turn = reference if isinstance(reference, list) else [reference]
        if len(by_turn) > len(turns) or not all(text is None or isinstance(text, str) for text in by_turn):
            raise InvalidInput(
                location, found=f"reference {reference!r:.80}", expected="a text, or a list with a text for each turn"
            )
        padded = (*(text or None for text in by_turn), *[None] * (len(turns) - len(by_turn)))
        prompt = Prompt(_id(line), tuple(turns), padded, str(line.get("category", "")))
        if prompt.id in by_id:
            raise InvalidInput(location, found=f"a second prompt with id {prompt.id}", expected="unique ids")
        by_id[prompt.id] = prompt
    for location, line in _lines(references.path, references.sha256) if references else ():
        try:
            texts = line["choices"][0]["turns"]
        except (KeyError, IndexError, TypeError):
            texts = None
        if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
            raise InvalidInput(
                location,
                found="no reference answer",
                expected="the format of MT-Bench: question_id, choices: [{turns: [...]}]",
            )
        if matched := by_id.get(_id(line)):
            padded = (*texts[: len(matched.turns)], *[None] * (len(matched.turns) - len(texts)))
            by_id[matched.id] = Prompt(matched.id, matched.turns, padded, matched.category)
    shuffled = sorted(by_id, key=lambda name: hashlib.sha256(f"{prompts.seed}/{name}".encode()).digest())
    selected = set(shuffled[: prompts.sample])
    if len(selected) < 2:
        raise InvalidInput(
            str(prompts.path), found=f"{len(selected)} prompts", expected="at least 2, preferably hundreds"
        )
    return tuple(prompt for prompt in by_id.values() if prompt.id in selected)


def _lines(path: Path, sha256: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    content = read_plain(path, MAX_DATA_BYTES)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InvalidInput(str(path), found="a file that changed during the run", remedy="run again")
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        yield line_location(path, number), {"id": number, **parse_line(line, path, number)}


def _id(line: Mapping[str, Any]) -> str:
    return str(line.get("question_id", line["id"]))
