"""Ancestors on the Hub: the card and the licence file of a repository at one commit, and nothing else of it.

A base model is often not at hand, and what its card says binds all the same. Each repository is asked for once in a
run. What cannot be read is reported and is never an error. After the first answer that does not come nothing more is
asked, so an outage is waited for once; what an earlier run has put into the Hub's own cache is read instead. With
``HF_HUB_OFFLINE=1`` the cache is all that is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from mergegate.tasks.checkpoints import CARD_FILE, card_path
from mergegate.tasks.checkpoints.hub import HubAccess, describe_hub_error, hub_access, is_offline, snapshots_directory
from mergegate.tasks.preflight.licenses.resolve import LICENSE_FILE, CardSource, NotRead

_PAGE = re.compile(r"https?://(?:www\.)?huggingface\.co/")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")
_TIMEOUT_S = 3.0  # for a connection, and for each piece of an answer
_PATIENCE_S = 10.0  # for all that is asked of one repository, names of hosts included
# Far more than any family of models has; a card that names hundreds is a mistake, or malice.
_MOST = 50
_OFFLINE = "HF_HUB_OFFLINE is set"

AncestorLookup = Callable[[str], CardSource | NotRead]
"""From an entry of `base_model` to what could be read of it."""


def hub_ancestors(most: int = _MOST) -> AncestorLookup:
    """A question to the Hub that remembers its answers, for one run.

    Args:
        most: How many repositories are asked for at most.
    """
    unavailable: list[str] = [_OFFLINE] if is_offline() else []  # why nothing more is asked
    asked: set[str] = set()

    @cache
    def access() -> HubAccess:  # only when there is something to ask: it loads the client
        return hub_access(writing=False)

    @cache
    def find(repository: str) -> CardSource | NotRead:
        asked.add(repository)
        if len(asked) > most:
            return NotRead(f"it has more than {most} ancestors on the Hub")
        if not unavailable:
            answer = _in_time(lambda: _read_repository(access(), repository))
            if not isinstance(answer, _HubUnavailable):
                return answer
            unavailable.append(answer.why)
        return _cached(repository) or NotRead(unavailable[0])

    def look_up(entry: str) -> CardSource | NotRead:
        repository = _PAGE.sub("", entry).rstrip("/")
        if not _REPOSITORY.fullmatch(repository):
            return NotRead("neither a directory here nor a repository on the Hub")
        return find(repository)

    return look_up


class _HubUnavailable(NotRead):
    """No answer: the network or the Hub, not this one repository."""


def _in_time(ask: Callable[[], CardSource | NotRead]) -> CardSource | NotRead:
    """The answer of ``ask``, unless it takes too long: whatever it waits for, a check does not wait for it."""
    answers: SimpleQueue[CardSource | NotRead | BaseException] = SimpleQueue()

    def answer() -> None:
        try:
            answers.put(ask())
        except BaseException as error:
            answers.put(error)

    Thread(target=answer, daemon=True).start()
    try:
        found = answers.get(timeout=_PATIENCE_S)
    except Empty:
        return _HubUnavailable(f"no answer from the Hub within {_PATIENCE_S:g} s")
    if isinstance(found, BaseException):
        raise found
    return found


def _read_repository(access: HubAccess, repository: str) -> CardSource | NotRead:
    """The card and the licence files of `repository` at the commit that is current now."""
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
                return NotRead("it is gated: ask for access, and set HF_TOKEN")
            # The Hub tells the metadata of a card also to those who may not see the repository.
            card = info.card_data.to_dict()  # type: ignore[no-untyped-call]  # the library leaves it untyped
            return CardSource(snapshots_directory(repository) / info.sha, info.sha, card)
        return CardSource(directory, info.sha)
    except (RepositoryNotFoundError, HFValidationError):
        return NotRead("it is not on the Hub, or private")
    except HfHubHTTPError as error:
        status = error.response.status_code
        kind = _HubUnavailable if status >= 500 or status == 429 else NotRead
        return kind(f"the Hub answered {status}")
    except OfflineModeIsEnabled:
        return _HubUnavailable(_OFFLINE)
    except (HTTPError, OSError, RuntimeError, ValueError, TypeError, LookupError) as error:
        # The network, a full disk, hf_xet's own, or an answer that is not the Hub's.
        return _HubUnavailable(f"no answer from the Hub: {describe_hub_error(error, access)}")


def _download(access: HubAccess, repository: str, commit: str, names: list[str]) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # documented, not in the types

    disable_progress_bars()
    directory = snapshots_directory(repository) / commit
    for name in names:
        if (name.lower() == CARD_FILE.lower() or LICENSE_FILE.fullmatch(name)) and not (directory / name).is_file():
            # The download itself tries five times and waits in between; this asks once whether it can succeed.
            url = hf_hub_url(repository, name, revision=commit, endpoint=access.endpoint)
            get_hf_file_metadata(url, token=access.token or False, timeout=_TIMEOUT_S, endpoint=access.endpoint)
            access.api().hf_hub_download(repository, name, revision=commit, etag_timeout=_TIMEOUT_S)
    return directory


def _cached(repository: str) -> CardSource | None:
    """The commit of `repository` that was downloaded last, if its card is among what was."""
    try:
        there = [place for place in snapshots_directory(repository).iterdir() if card_path(place)]
        newest = max(there, key=lambda place: (place.stat().st_mtime_ns, place.name), default=None)
    except OSError:
        return None
    return CardSource(newest, newest.name) if newest else None
