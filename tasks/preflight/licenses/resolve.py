"""What a model's files declare about its licence, and about the models it was made from.

A card is somebody else's text: whatever stands in it, reading it raises nothing. What cannot be understood counts as
not declared, with the reason in `problems`.

    root, *ancestors = walk(CardSource(Path("models/acme-chat")), find)
    parents = lineage(CardSource(Path("models/acme-chat")), find, load_table()).models    # for `combine_licenses`
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import open_plain, read_json
from mergegate.tasks.checkpoints import NO_CARD, NO_FRONT_MATTER, ModelCard, card_path, read_card
from mergegate.tasks.preflight.licenses.case import Licensed, LicensedParent, Unread
from mergegate.tasks.preflight.licenses.table import OTHER, UNKNOWN, License, LicenseTable
from mergegate.tasks.preflight.licenses.texts import linked, recognised


@dataclass(frozen=True)
class CardSource:
    """Where the card and the licence file of a model lie.

    Attributes:
        directory: A model in Hugging Face layout, or as much of it as was downloaded; it need not exist.
        revision: Commit of the Hub; None for a local directory.
        card: The metadata of the card where the Hub tells only that (a gated repository); None: read README.md.
    """

    directory: Path
    revision: str | None = None
    card: Mapping[object, object] | None = None


@dataclass(frozen=True)
class NotRead:
    """Why an ancestor could not be read, in words."""

    why: str


FindAncestor = Callable[[str, CardSource], CardSource | NotRead]
"""From an entry of `base_model` and the place of the model that names it: the ancestor's place."""

LICENSE_FILE = re.compile(r"(licen[cs]e|copying)(\.(md|txt|rst))?", re.IGNORECASE)
_LICENSE_BYTES = 200_000
_QUOTED_CHARACTERS = 80
_MOST_BESIDE = 1000  # directories that are looked through for a base model


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
        license_text: Its content; empty where there are several such files, because which one counts is not said.
        unread: Entries of `base_model` that `walk` could not read, each with the reason.
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
    license_text: str = ""
    unread: tuple[Unread, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The declaration for a message: what stands in the card, and what was wrong with it."""
        fields = {"license": " / ".join(self.license), "license_name": self.license_name}
        named = [f"{key}: {quoted(value)}" for key, value in fields.items() if value]
        return "; ".join([*named, *self.problems])

    @property
    def names_none(self) -> bool:
        """Whether the card names no licence, and nothing in it hides one."""
        named = [word for word in self.license if word.strip().lower() not in (OTHER, UNKNOWN)]
        return not named and all(problem in (NO_CARD, NO_FRONT_MATTER) for problem in self.problems)


def declared(place: CardSource, name: str | None = None) -> Declaration:
    """Read the model card and the licence file of the model at `place`. Raises nothing.

    Args:
        name: What to call the model; by default the name of the directory.
    """
    read = read_card(place.directory) if place.card is None else ModelCard(place.card)
    card, problems = read.metadata, [words for words in (read.absence, read.problem) if words]
    licenses = _texts(card, "license", problems)
    license_name, license_link = _text(card, "license_name", problems), _text(card, "license_link", problems)
    base_model = tuple(dict.fromkeys(_texts(card, "base_model", problems)))
    license_file, license_sha256, license_text = _license_file(place.directory, problems)
    return Declaration(
        name=name or place.directory.name,
        license=licenses,
        license_name=license_name,
        license_link=license_link,
        base_model=base_model,
        license_file=license_file,
        license_sha256=license_sha256,
        license_text=license_text,
        problems=tuple(problems),
    )


def walk(root: CardSource, find: FindAncestor, name: str | None = None) -> tuple[Declaration, ...]:
    """The declarations of the model at `root` and of every ancestor that can be read, nearest first.

    An ancestor of a local model is looked for as a path relative to its descendant's directory, then beside that
    directory by its name, then by `find`. Each place is read once, so diamonds are short and cycles end.
    """
    return tuple(step.declaration for step in _steps(root, find, name))


@dataclass(frozen=True)
class Lineage:
    """A model and its ancestors, and the licence files beside them.

    Attributes:
        models: Each with its own ancestors, so that a licence is compared with all that it goes back to; the model
            itself first.
        texts: Content of the licence files by sha256 (`Licensed.own_file`).
    """

    models: tuple[LicensedParent, ...]
    texts: Mapping[str, str]


def lineage(
    root: CardSource,
    find: FindAncestor,
    table: LicenseTable,
    name: str | None = None,
    names: Mapping[Path, str] = MappingProxyType({}),
) -> Lineage:
    """The model at `root` and every readable ancestor as parents for `combine_licenses`.

    Args:
        names: What models are called that have a name already, by resolved directory, however a card names them.
    """
    steps = _steps(root, find, name, names)
    own = [_licensed(step, table) for step in steps]
    models = tuple(
        LicensedParent(
            **{field: getattr(own[place], field) for field in Licensed.model_fields},
            ancestors=tuple(own[ancestor] for ancestor in _above(steps, place)),
            unread=step.declaration.unread,
        )
        for place, step in enumerate(steps)
    )
    found = [step.declaration for step in steps]
    return Lineage(models, {one.license_sha256: one.license_text for one in found if one.license_sha256})


def _licensed(step: _Step, table: LicenseTable) -> Licensed:
    declaration = step.declaration
    license = table.lookup(declaration.license or None, declaration.license_name)
    contradicted = None
    beside = recognised(declaration.license_text, table, license) if declaration.license_text else None
    if not license.resolved and declaration.names_none:
        # `other`, or nothing: what lies beside the card, or what it links to, is what the author meant.
        link = linked(declaration.license_link, table) if declaration.license_link else None
        license = beside or link or license
    elif beside is not None and beside.id != license.id:
        if _is_family(license, beside):
            license = beside
        elif license.resolved:
            contradicted = beside
    return Licensed(
        name=quoted(declaration.name),
        license=license,
        declared=declaration.words,
        contradicted=contradicted,
        own_file=declaration.license_sha256,
        revision=step.place.revision,
    )


def _is_family(declared: License, beside: License) -> bool:
    """Whether the card names a family of licences (`gpl`, `cc`, `bsd`, `openrail`), and the file one of it."""
    return beside.id.startswith(f"{declared.id}-") or (declared.id == "openrail" and beside.kind == "rail")


@dataclass(frozen=True)
class _Step:
    """One model on the way up; `bases` are the numbers in the walk of the models that it was made from."""

    place: CardSource
    declaration: Declaration
    bases: tuple[int, ...]


def _steps(
    root: CardSource, find: FindAncestor, name: str | None, names: Mapping[Path, str] = MappingProxyType({})
) -> list[_Step]:
    steps: list[_Step] = []
    queue = [(root, name)]
    numbers = {_identity(root): 0}
    while len(steps) < len(queue):
        here, called = queue[len(steps)]
        declaration = declared(here, called)
        bases, unread = [], []
        for entry in declaration.base_model:
            there = _beside(here, entry) or find(entry, here)
            if isinstance(there, NotRead):
                unread.append(Unread(name=quoted(entry), why=there.why))
                continue
            if _identity(there) not in numbers:
                numbers[_identity(there)] = len(queue)
                queue.append((there, names.get(_identity(there), entry)))
            bases.append(numbers[_identity(there)])
        steps.append(_Step(here, declaration.model_copy(update={"unread": tuple(unread)}), tuple(bases)))
    return steps


def _above(steps: list[_Step], place: int) -> list[int]:
    """The numbers of all ancestors of the model at `place`, without itself."""
    found: set[int] = set()
    ahead = list(steps[place].bases)
    while ahead:
        here = ahead.pop()
        if here not in found and here != place:
            found.add(here)
            ahead.extend(steps[here].bases)
    return sorted(found)


def _identity(place: CardSource) -> Path:
    try:
        return place.directory.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of symbolic links, or a name that no file can have
        return place.directory


def _beside(place: CardSource, entry: str) -> CardSource | None:
    """What `entry` names relative to a local directory, or as a model of the Hub that lies beside it. Absolute paths,
    and paths on the Hub, mean another machine."""
    if place.revision is not None:
        return None
    try:
        there = place.directory / entry
        if there.is_dir() and not Path(entry).is_absolute():
            return CardSource(there)
        return _neighbour(place.directory.resolve(), entry)
    except (OSError, ValueError, RuntimeError):  # a name that no file can have: too long, with a NUL, a circle of links
        return None


def _neighbour(directory: Path, entry: str) -> CardSource | None:
    """The model `org/name` in a directory beside `directory`, of which something is known: by the directory's name
    (`name`, `org--name`, `org_name`), else the only one whose config.json says that it is it. None: ask the Hub."""
    owner, slash, name = entry.strip().rpartition("/")
    if not slash or "/" in owner or not name:
        return None
    called = {one.lower() for one in (name, f"{owner}--{name}", f"{owner}__{name}", f"{owner}_{name}")}
    near = (one for one in islice(directory.parent.iterdir(), _MOST_BESIDE) if one != directory and one.is_dir())
    known = sorted(one for one in near if _says_its_licence(one))
    named = [one for one in known if one.name.lower() in called]
    # What was trained from the model says its name, too, and says in its card that it was made from it.
    found = named or [one for one in known if _own_name(one) == entry and entry not in _bases_of(one)]
    return CardSource(found[0]) if len(found) == 1 else None


def _says_its_licence(directory: Path) -> bool:
    return card_path(directory) is not None or any(LICENSE_FILE.fullmatch(path.name) for path in directory.iterdir())


def _own_name(directory: Path) -> str:
    """What a config.json calls its model; empty where it does not."""
    try:
        return str(read_json(directory / "config.json").get("_name_or_path") or "")
    except InvalidInput:
        return ""


def _bases_of(directory: Path) -> tuple[str, ...]:
    return _texts(read_card(directory).metadata, "base_model", [])


def _text(card: Mapping[object, object], field: str, problems: list[str]) -> str | None:
    value = card.get(field)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str):
        return value.strip()
    # Only the type is told: YAML anchors can make a small text into a value too large to print.
    problems.append(f"{field} is a {type(value).__name__}, not text")
    return None


def _texts(card: Mapping[object, object], field: str, problems: list[str]) -> tuple[str, ...]:
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


def _license_file(directory: Path, problems: list[str]) -> tuple[str | None, str | None, str]:
    """Name, sha256 and content of the licence file; the content only where it is the only one, and small."""
    try:
        names = sorted(path.name for path in directory.iterdir() if LICENSE_FILE.fullmatch(path.name))
        names = [name for name in names if not (directory / name).is_dir()]
        if not names:
            return None, None, ""
        with open_plain(directory / names[0], within=directory) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # raw is enough
            file.seek(0)
            data = file.read(_LICENSE_BYTES + 1)
        whole = len(names) == 1 and len(data) <= _LICENSE_BYTES
        return names[0], digest, data.decode("utf-8", errors="replace") if whole else ""
    except FileNotFoundError:
        return None, None, ""
    except (InvalidInput, OSError) as error:
        found = error.found if isinstance(error, InvalidInput) else type(error).__name__
        problems.append(f"the licence file cannot be read: {found}")
        return None, None, ""


def quoted(text: str) -> str:
    """Return the words of a card for a message: one line, printable, short."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= _QUOTED_CHARACTERS else clean[:_QUOTED_CHARACTERS] + "…"
