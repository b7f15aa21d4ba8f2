"""Read the declarations in a model's files about its license and about the models that it descends from.

A card is untrusted text, so reading it never raises. Anything unintelligible counts as not declared, with the reason in
`problems`.

    root, *ancestors = walk(CardSource(Path("models/acme-chat")), find) parents =
    lineage(CardSource(Path("models/acme-chat")), find, load_table()).models    # for `combine_licenses`

A base model is often not available locally, and its license is binding anyway. `hub_ancestors` looks up such models on
the Hub, reading only the card and the license files. A run requests each repository once. Anything unreadable is
reported and is never an error. After the first timeout mergegate sends no more requests, so it waits for an outage only
once, and reads the Hub's cache from earlier runs. With ``HF_HUB_OFFLINE=1`` it reads only the cache.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import MappingProxyType

from pydantic import BaseModel

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import open_plain, read_json
from mergegate.tasks.models.checkpoints import CARD_FILE, NO_CARD, NO_FRONT_MATTER, ModelCard, card_path, read_card
from mergegate.tasks.models.checkpoints.hub import (
    HubAccess,
    describe_hub_error,
    hub_access,
    is_offline,
    snapshots_directory,
)
from mergegate.tasks.preflight.licenses.rules import Licensed, LicensedParent, Unread
from mergegate.tasks.preflight.licenses.table import OTHER, UNKNOWN, LicenseTable, identify_license, license_by_link


@dataclass(frozen=True)
class CardSource:
    """Location of a model's card and license file."""

    directory: Path  # Model in Hugging Face layout, or the downloaded part of it; the directory need not exist.
    revision: str | None = None  # Commit on the Hub; None for a local directory.
    # Metadata of the card if the Hub provides nothing else (a gated repository). None: read README.md.
    card: Mapping[object, object] | None = None


@dataclass(frozen=True)
class NotRead:
    """Reason why an ancestor could not be read."""

    why: str


FindAncestor = Callable[[str, CardSource], CardSource | NotRead]
"""Function from an entry in `base_model`, and the source whose card contains it, to the source of the ancestor."""

LICENSE_FILE = re.compile(r"(licen[cs]e|copying)(\.(md|txt|rst))?", re.IGNORECASE)
_LICENSE_BYTES = 200_000
_QUOTED_CHARACTERS = 80
_MAX_NEIGHBORS = 1000  # Largest number of directories to search for a base model.


class Declaration(BaseModel, frozen=True, extra="forbid"):
    """Declarations in one model's files about its license, without any judgment."""

    name: str  # Name in the recipe or in the card of a descendant.
    # `license` in the card: several values if it is a list, none if missing or unreadable.
    license: tuple[str, ...] = ()
    license_name: str | None = None  # `license_name` in the card.
    license_link: str | None = None  # `license_link` in the card.
    base_model: tuple[str, ...] = ()  # Models that it descends from, as the card names them.
    license_file: str | None = None  # Name of the license file next to the weights.
    license_sha256: str | None = None  # sha256 of that file, in hexadecimal.
    # Content of that file; empty if there are several such files, because it is unknown which one counts.
    license_text: str = ""
    revision: str | None = None  # Commit on the Hub; None for a local directory.
    bases: tuple[int, ...] = ()  # Positions of its base models in the result of `walk`.
    unread: tuple[Unread, ...] = ()  # Entries in `base_model` that `walk` could not read, each with the reason.
    problems: tuple[str, ...] = ()  # Descriptions of unintelligible parts.

    @property
    def words(self) -> str:
        """License fields of the card and its problems, for a message."""
        fields = {"license": " / ".join(self.license), "license_name": self.license_name}
        quotes = [f"{key}: {quote_text(value)}" for key, value in fields.items() if value]
        return "; ".join([*quotes, *self.problems])


def read_declaration(source: CardSource, name: str | None = None) -> Declaration:
    """Read the model card and the license file of the model at `source`, and never raise.

    ``name`` is the name of the model. Default: the name of the directory.
    """
    model_card = read_card(source.directory) if source.card is None else ModelCard(source.card)
    card, problems = model_card.metadata, [words for words in (model_card.absence, model_card.problem) if words]
    fields = {  # Reading them adds to the problems.
        "license": _texts(card, "license", problems),
        "license_name": _text(card, "license_name", problems),
        "license_link": _text(card, "license_link", problems),
        "base_model": tuple(dict.fromkeys(_texts(card, "base_model", problems))),
    }
    try:
        entries = sorted(path.name for path in source.directory.iterdir() if LICENSE_FILE.fullmatch(path.name))
        files = [entry for entry in entries if not (source.directory / entry).is_dir()]
        if files:
            with open_plain(source.directory / files[0], within=source.directory) as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # A raw stream suffices.
                file.seek(0)
                data = file.read(_LICENSE_BYTES + 1)
            is_usable = len(files) == 1 and len(data) <= _LICENSE_BYTES  # With several files, the right one is unknown.
            text = data.decode("utf-8", errors="replace") if is_usable else ""
            fields |= {"license_file": files[0], "license_sha256": sha256, "license_text": text}
    except FileNotFoundError:
        pass
    except (InvalidInput, OSError) as error:
        detail = error.found if isinstance(error, InvalidInput) else type(error).__name__
        problems.append(f"the license file cannot be read: {detail}")
    fields |= {"name": name or source.directory.name, "revision": source.revision, "problems": tuple(problems)}
    return Declaration.model_validate(fields)


def walk(
    root: CardSource, find: FindAncestor, name: str | None = None, names: Mapping[Path, str] = MappingProxyType({})
) -> tuple[Declaration, ...]:
    """Return the declarations of the model at `root` and of every readable ancestor, nearest first.

    An ancestor of a local model is searched as a path relative to its descendant's directory, then next to that
    directory by its name, then by `find`. Each location is read once, so shared ancestors do not repeat and cycles end.
    ``names`` maps resolved directories to model names, which take precedence over names in cards.
    """
    declarations: list[Declaration] = []
    queue = [(root, name)]
    numbers = {_identity(root): 0}
    while len(declarations) < len(queue):
        source, source_name = queue[len(declarations)]
        declaration = read_declaration(source, source_name)
        bases, unread = [], []
        for entry in declaration.base_model:
            ancestor = _local_ancestor(source, entry) or find(entry, source)
            if isinstance(ancestor, NotRead):
                unread.append(Unread(name=quote_text(entry), why=ancestor.why))
                continue
            if _identity(ancestor) not in numbers:
                numbers[_identity(ancestor)] = len(queue)
                queue.append((ancestor, names.get(_identity(ancestor), entry)))
            bases.append(numbers[_identity(ancestor)])
        declarations.append(declaration.model_copy(update={"unread": tuple(unread), "bases": tuple(bases)}))
    return tuple(declarations)


@dataclass(frozen=True)
class Lineage:
    """A model and its ancestors, each with its own ancestors, and the content of their license files.

    The model itself comes first. ``texts`` is indexed by sha256 (`Licensed.own_file`).
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
    """Return the model at `root` and every readable ancestor, as parents for `combine_licenses`.

    A model is bound by the license in its card, the license file next to it, or both. For ``names``, see :func:`walk`.
    """
    declarations = walk(root, find, name, names)
    models = []
    for declaration in declarations:
        license = table.lookup(declaration.license or None, declaration.license_name)
        contradicted = None
        file_license = identify_license(declaration.license_text, table, license) if declaration.license_text else None
        declares_license = any(word.strip().lower() not in (OTHER, UNKNOWN) for word in declaration.license)
        # An unreadable part of the card could contain a license.
        is_readable = all(problem in (NO_CARD, NO_FRONT_MATTER) for problem in declaration.problems)
        if not license.resolved and not declares_license and is_readable:
            # With `other` or no declaration, the author meant the license in the neighboring file or the link.
            linked_license = license_by_link(declaration.license_link, table) if declaration.license_link else None
            license = file_license or linked_license or license
        elif file_license is not None and file_license.id != license.id:
            # The card may name a license family (`gpl`, `cc`, `bsd`, `openrail`), and the file a member of it.
            is_rail = license.id == "openrail" and file_license.kind == "rail"
            if file_license.id.startswith(f"{license.id}-") or is_rail:
                license = file_license
            elif license.resolved:
                contradicted = file_license
        models.append(
            Licensed(
                name=quote_text(declaration.name),
                license=license,
                declared=declaration.words,
                contradicted=contradicted,
                own_file=declaration.license_sha256,
                revision=declaration.revision,
            )
        )
    parents = tuple(
        LicensedParent(
            **{field: getattr(model, field) for field in Licensed.model_fields},
            ancestors=tuple(models[ancestor] for ancestor in _above(declarations, position)),
            unread=declarations[position].unread,
        )
        for position, model in enumerate(models)
    )
    return Lineage(parents, {item.license_sha256: item.license_text for item in declarations if item.license_sha256})


def _above(models: Sequence[Declaration], position: int) -> list[int]:
    """Return the positions of all ancestors of the model at `position`, without the model itself."""
    ancestors: set[int] = set()
    pending = list(models[position].bases)
    while pending:
        current = pending.pop()
        if current not in ancestors and current != position:
            ancestors.add(current)
            pending.extend(models[current].bases)
    return sorted(ancestors)


def _identity(source: CardSource) -> Path:
    try:
        return source.directory.resolve()
    except (OSError, RuntimeError, ValueError):  # A loop of symbolic links, or an impossible file name.
        return source.directory


def _local_ancestor(source: CardSource, entry: str) -> CardSource | None:
    """Return the model that `entry` names, relative to a local directory or as a Hub model stored next to it.

    Absolute paths, and paths on the Hub, refer to another machine. The directory of a Hub model `org/name` must have a
    card or a license file. Its name (`name`, `org--name`, `org_name`) decides first, then a unique config.json that
    names the model. None means to request it from the Hub.
    """
    if source.revision is not None:
        return None
    try:
        path = source.directory / entry
        if path.is_dir() and not Path(entry).is_absolute():
            return CardSource(path)
        owner, slash, name = entry.strip().rpartition("/")
        if not slash or "/" in owner or not name:
            return None

        directory = source.directory.resolve()
        folder_names = {item.lower() for item in (name, f"{owner}--{name}", f"{owner}__{name}", f"{owner}_{name}")}
        declaring = sorted(
            neighbor
            for neighbor in islice(directory.parent.iterdir(), _MAX_NEIGHBORS)
            if neighbor != directory and neighbor.is_dir()
            if card_path(neighbor) or any(LICENSE_FILE.fullmatch(path.name) for path in neighbor.iterdir())
        )
        matches = [neighbor for neighbor in declaring if neighbor.name.lower() in folder_names]
        for neighbor in () if matches else declaring:
            own_name = ""
            with suppress(InvalidInput):
                own_name = str(read_json(neighbor / "config.json").get("_name_or_path") or "")
            # A model trained from it may keep its name in config.json, but names it in its card as the base.
            if own_name == entry and entry not in _texts(read_card(neighbor).metadata, "base_model", []):
                matches.append(neighbor)
        return CardSource(matches[0]) if len(matches) == 1 else None
    except (OSError, ValueError, RuntimeError):  # A name that is too long or contains NUL, or a loop of links.
        return None


def _text(card: Mapping[object, object], field: str, problems: list[str]) -> str | None:
    value = card.get(field)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str):
        return value.strip()
    # Report only the type, because YAML anchors can expand a small text into a value too large to print.
    problems.append(f"{field} is a {type(value).__name__}, not text")
    return None


def _texts(card: Mapping[object, object], field: str, problems: list[str]) -> tuple[str, ...]:
    """Return a field that may be a text or a list of texts. A list with any other entry is ignored completely."""
    value = card.get(field)
    if not isinstance(value, list):
        text = _text(card, field, problems)
        return () if text is None else (text,)
    invalid = [entry for entry in value if not isinstance(entry, str) or not entry.strip()]
    if invalid:
        problems.append(f"{field} is a list with an entry that is not text: {type(invalid[0]).__name__}")
        return ()
    return tuple(entry.strip() for entry in value)


def quote_text(text: str) -> str:
    """Return words from a card for a message: one line, printable, short."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= _QUOTED_CHARACTERS else clean[:_QUOTED_CHARACTERS] + "…"


_PAGE = re.compile(r"https?://(?:www\.)?huggingface\.co/")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")
_TIMEOUT_S = 3.0  # Limit for a connection, and for each part of a response.
_TOTAL_TIMEOUT_S = 10.0  # Limit for all requests about one repository, including name resolution.
# Far more ancestors than any model has. A card that names hundreds is a mistake or malicious.
_MAX_REPOSITORIES = 50
_OFFLINE = "HF_HUB_OFFLINE is set"

AncestorLookup = Callable[[str], CardSource | NotRead]
"""Function from an entry in `base_model` to the location of that model's card and license files."""


def hub_ancestors(limit: int = _MAX_REPOSITORIES) -> AncestorLookup:
    """Return a lookup for Hub repositories that caches its results and requests at most ``limit`` repositories."""
    unavailable: list[str] = [_OFFLINE] if is_offline() else []  # Reason why no more requests are sent.
    requested: set[str] = set()

    @cache
    def access() -> HubAccess:  # Created on first use, because it loads the client.
        return hub_access(writing=False)

    @cache
    def find(repository: str) -> CardSource | NotRead:
        requested.add(repository)
        if len(requested) > limit:
            return NotRead(f"it has more than {limit} ancestors on the Hub")
        if not unavailable:
            answer = _in_time(lambda: _read_repository(access(), repository))
            if not isinstance(answer, _HubUnavailable):
                return answer
            unavailable.append(answer.why)
        # Use the newest commit with a card that an earlier run has downloaded.
        with suppress(OSError):
            snapshots = [snapshot for snapshot in snapshots_directory(repository).iterdir() if card_path(snapshot)]
            newest = max(snapshots, key=lambda snapshot: (snapshot.stat().st_mtime_ns, snapshot.name), default=None)
            if newest:
                return CardSource(newest, newest.name)
        return NotRead(unavailable[0])

    def look_up(entry: str) -> CardSource | NotRead:
        repository = _PAGE.sub("", entry).rstrip("/")
        if not _REPOSITORY.fullmatch(repository):
            return NotRead("it is neither a local directory nor a repository on the Hub")
        return find(repository)

    return look_up


class _HubUnavailable(NotRead):
    """No response from the network or the Hub as such, as opposed to a problem with one repository."""


def _in_time(request: Callable[[], CardSource | NotRead]) -> CardSource | NotRead:
    """Return the result of ``request``, or give up after a time limit."""
    results: SimpleQueue[CardSource | NotRead | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            results.put(request())
        except BaseException as error:
            results.put(error)

    Thread(target=run, daemon=True).start()
    try:
        result = results.get(timeout=_TOTAL_TIMEOUT_S)
    except Empty:
        return _HubUnavailable(f"the Hub did not respond within {_TOTAL_TIMEOUT_S:g} s")
    if isinstance(result, BaseException):
        raise result
    return result


def _read_repository(access: HubAccess, repository: str) -> CardSource | NotRead:
    """Return the location of the card and license files of `repository` at its current commit."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # httpx or httpx2, as the library's version has it
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        info = access.api().model_info(repository, timeout=_TIMEOUT_S)
        if info.sha is None:
            return NotRead("it has no commits")
        try:
            directory = _download(access, repository, info.sha, [file.rfilename for file in info.siblings or ()])
        except GatedRepoError:
            if info.card_data is None:
                return NotRead("it is gated; request access and set HF_TOKEN")
            # The Hub returns the metadata of a card even to users who have no access to the repository.
            card = info.card_data.to_dict()  # type: ignore[no-untyped-call]  # the library leaves it untyped
            return CardSource(snapshots_directory(repository) / info.sha, info.sha, card)
        return CardSource(directory, info.sha)
    except (RepositoryNotFoundError, HFValidationError):
        return NotRead("it does not exist on the Hub or is private")
    except HfHubHTTPError as error:
        status = error.response.status_code
        kind = _HubUnavailable if status >= 500 or status == 429 else NotRead
        return kind(f"the Hub responded with status {status}")
    except OfflineModeIsEnabled:
        return _HubUnavailable(_OFFLINE)
    except (HTTPError, OSError, RuntimeError, ValueError, TypeError, LookupError) as error:
        # The network, a full disk, errors of hf_xet, or a response that is not from the Hub.
        return _HubUnavailable(f"the Hub did not respond: {describe_hub_error(error, access)}")


def _download(access: HubAccess, repository: str, commit: str, names: list[str]) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # documented, not in the types

    disable_progress_bars()
    directory = snapshots_directory(repository) / commit
    for name in names:
        if (name.lower() == CARD_FILE.lower() or LICENSE_FILE.fullmatch(name)) and not (directory / name).is_file():
            # The download retries five times with waits. This single request tests whether it can succeed.
            url = hf_hub_url(repository, name, revision=commit, endpoint=access.endpoint)
            get_hf_file_metadata(url, token=access.token or False, timeout=_TIMEOUT_S, endpoint=access.endpoint)
            access.api().hf_hub_download(repository, name, revision=commit, etag_timeout=_TIMEOUT_S)
    return directory
