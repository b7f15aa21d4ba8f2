"""What a model's files declare about its licence, and about the models it was made from.

A card is somebody else's text: whatever stands in it, reading it raises nothing. What cannot be understood counts as
not declared, with the reason in `problems`.

    root, *ancestors = walk(Path("models/acme-chat"), find)
    parents = lineage(Path("models/acme-chat"), find, load_table())      # the same, judged: goes into `combine`
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

from tasks.licenses.case import Licensed, Parent
from tasks.licenses.table import LicenseTable

Find = Callable[[str, Path], Path | None]
"""From an entry of `base_model` and the directory of the model that names it: the ancestor's directory, if readable."""

_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_LICENSE_FILE = re.compile(r"(licen[cs]e|copying)(\.(md|txt|rst))?", re.IGNORECASE)
_CARD_CHARACTERS = 1_000_000
_QUOTED_CHARACTERS = 80


class Declaration(BaseModel):
    """What one model's files say about its licence. Nothing is judged here.

    Attributes:
        name: The model, as its user or its descendant's card names it.
        license: `license` of the card; several when it is a list, none when missing or unreadable.
        license_name: `license_name` of the card.
        license_link: `license_link` of the card.
        base_model: The models that it was made from, as the card names them.
        license_file: Name of the licence file beside the weights.
        license_sha256: sha256 of that file, hexadecimal.
        unread: Entries of `base_model` that `walk` found no directory for.
        problems: What could not be understood, in words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    license: tuple[str, ...] = ()
    license_name: str | None = None
    license_link: str | None = None
    base_model: tuple[str, ...] = ()
    license_file: str | None = None
    license_sha256: str | None = None
    unread: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The declaration for a message: what stands in the card, and what was wrong with it."""
        fields = {"license": " / ".join(self.license), "license_name": self.license_name}
        said = [f"{key}: {_quoted(value)}" for key, value in fields.items() if value]
        return "; ".join([*said, *self.problems])


def declared(directory: Path, name: str | None = None) -> Declaration:
    """Read the model card and the licence file of the model in `directory`. Raises nothing.

    Args:
        directory: A model in Hugging Face layout; it need not exist.
        name: What to call the model; by default the name of the directory.
    """
    card, problems = _card(directory)
    licenses = _texts(card, "license", problems)
    license_name, license_link = _text(card, "license_name", problems), _text(card, "license_link", problems)
    base_model = tuple(dict.fromkeys(_texts(card, "base_model", problems)))
    license_file, license_sha256 = _license_file(directory, problems)
    return Declaration(
        name=name or directory.name,
        license=licenses,
        license_name=license_name,
        license_link=license_link,
        base_model=base_model,
        license_file=license_file,
        license_sha256=license_sha256,
        problems=tuple(problems),
    )


def walk(directory: Path, find: Find, name: str | None = None) -> tuple[Declaration, ...]:
    """The declarations of the model in `directory` and of every ancestor that can be read, nearest first.

    An ancestor is looked for as a path relative to its descendant's directory, then by `find`. Each directory is read
    once, so diamonds are short and cycles end.
    """
    return tuple(step.declaration for step in _steps(directory, find, name))


def lineage(directory: Path, find: Find, table: LicenseTable, name: str | None = None) -> tuple[Parent, ...]:
    """The model in `directory` and every readable ancestor as parents for `combine`, the model itself first.

    Each comes with its own ancestors, so that a licence is compared with all that it goes back to.
    """
    steps = _steps(directory, find, name)
    own = [_licensed(step.declaration, table) for step in steps]
    return tuple(
        Parent(
            name=own[place].name,
            license=own[place].license,
            declared=own[place].declared,
            ancestors=tuple(own[ancestor] for ancestor in _above(steps, place)),
            unread=tuple(_quoted(entry) for entry in step.declaration.unread),
        )
        for place, step in enumerate(steps)
    )


def _licensed(declaration: Declaration, table: LicenseTable) -> Licensed:
    license = table.lookup(declaration.license or None, declaration.license_name)
    return Licensed(name=_quoted(declaration.name), license=license, declared=declaration.words)


@dataclass(frozen=True)
class _Step:
    """One model on the way up; `bases` are the places in the walk of the models that it was made from."""

    declaration: Declaration
    bases: tuple[int, ...]


def _steps(directory: Path, find: Find, name: str | None) -> list[_Step]:
    steps: list[_Step] = []
    queue = [(directory, name)]
    places = {_identity(directory): 0}
    while len(steps) < len(queue):
        here, called = queue[len(steps)]
        declaration = declared(here, called)
        bases, unread = [], []
        for entry in declaration.base_model:
            there = _beside(here, entry) or find(entry, here)
            if there is None:
                unread.append(entry)
                continue
            if _identity(there) not in places:
                places[_identity(there)] = len(queue)
                queue.append((there, entry))
            bases.append(places[_identity(there)])
        steps.append(_Step(declaration.model_copy(update={"unread": tuple(unread)}), tuple(bases)))
    return steps


def _above(steps: list[_Step], place: int) -> list[int]:
    """The places of all ancestors of the model at `place`, without itself."""
    found: set[int] = set()
    ahead = list(steps[place].bases)
    while ahead:
        here = ahead.pop()
        if here not in found and here != place:
            found.add(here)
            ahead.extend(steps[here].bases)
    return sorted(found)


def _identity(directory: Path) -> str:
    try:
        return str(directory.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of symbolic links, or a name that no file can have
        return str(directory)


def _beside(directory: Path, entry: str) -> Path | None:
    """The directory that `entry` names relative to `directory`. A card's absolute paths mean another machine."""
    try:
        there = directory / entry
        return there if there.is_dir() and not Path(entry).is_absolute() else None
    except (OSError, ValueError):  # a name that no file can have: too long, or with a NUL
        return None


def _card(directory: Path) -> tuple[dict[object, object], list[str]]:
    """The front matter of README.md, and what is wrong with it."""
    try:
        with (directory / "README.md").open(encoding="utf-8", errors="replace", newline="") as file:
            text = file.read(_CARD_CHARACTERS)
    except FileNotFoundError:
        return {}, ["there is no README.md"]
    except (OSError, ValueError) as error:
        return {}, [f"README.md cannot be read: {type(error).__name__}"]
    matter = _FRONT_MATTER.match(text)
    if matter is None:
        return {}, ["README.md has no front matter"]
    try:
        card = yaml.safe_load(matter[1])
    except Exception as error:
        # Not only YAMLError: on hostile input PyYAML also lets out ValueError, KeyError, IndexError, RecursionError.
        return {}, [f"the front matter of README.md is not valid YAML: {type(error).__name__}"]
    if not isinstance(card, dict):
        return {}, [f"the front matter of README.md is a {type(card).__name__}, not a mapping"]
    return card, []


def _text(card: dict[object, object], field: str, problems: list[str]) -> str | None:
    value = card.get(field)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str):
        return value.strip()
    # Only the type is told: YAML anchors can make a small text into a value too large to print.
    problems.append(f"{field} is a {type(value).__name__}, not text")
    return None


def _texts(card: dict[object, object], field: str, problems: list[str]) -> tuple[str, ...]:
    """A field that may be a text or a list of texts. A list with anything else in it is not believed at all."""
    value = card.get(field)
    if not isinstance(value, list):
        text = _text(card, field, problems)
        return () if text is None else (text,)
    odd = [entry for entry in value if not isinstance(entry, str) or not entry.strip()]
    if odd:
        problems.append(f"{field} is a list with an entry that is not text: {type(odd[0]).__name__}")
        return ()
    return tuple(entry.strip() for entry in value)


def _license_file(directory: Path, problems: list[str]) -> tuple[str | None, str | None]:
    try:
        names = sorted(
            path.name for path in directory.iterdir() if _LICENSE_FILE.fullmatch(path.name) and path.is_file()
        )
        if not names:
            return None, None
        with (directory / names[0]).open("rb") as file:
            return names[0], hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        problems.append(f"the licence file cannot be read: {type(error).__name__}")
        return None, None


def _quoted(text: str) -> str:
    """A stranger's words for a message: one line, printable, short."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= _QUOTED_CHARACTERS else clean[:_QUOTED_CHARACTERS] + "…"
