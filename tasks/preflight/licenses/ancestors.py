"""Look up the ancestors of a model on the Hub, reading only the card and the license files of a repository.

A base model is often not available locally, and its license is binding anyway. A run requests each repository once.
Anything unreadable is reported and is never an error. After the first timeout mergegate sends no more requests, so it
waits for an outage only once, and reads the Hub's cache from earlier runs. With ``HF_HUB_OFFLINE=1`` it reads only the
cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from mergegate.tasks.checkpoints import CARD_FILE, card_path
from mergegate.tasks.checkpoints.hub import HubAccess, describe_hub_error, hub_access, is_offline, snapshots_directory
from mergegate.tasks.preflight.licenses.resolve import LICENSE_FILE, CardSource, NotRead

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
