"""Define the contract of a publishing target: its settings in a profile, and its operations on published releases.

::

    publish: {to: shelf, place: /srv/models}      # in a profile

    class Shelf(PublishTarget):                   # in the module of the target, which ``registry`` finds
        to: Literal["shelf"]                      # the target's name in a profile
        place: Path                               # its settings: strict, frozen, each with a description

        def check(self, root): ...                # before the merge: would publishing fail?
        def current_release(self, root): ...      # the current release (the champion)
        def publish(self, request): ...           # all of a release or nothing, and never twice
        def for_variants(self, suffix): ...       # the place of quantized variants, next to the release
        @classmethod
        def open(cls, reference): ...             # a published release, to verify or reproduce

A run calls the first three in this order. Hours may pass between ``check`` and ``publish``, and another publisher may
release in the meantime. To detect that, a run passes the ``head`` from ``current_release`` to ``publish`` as
``expected_head``.

An alias such as ``production`` points to one of the published versions. A version never changes; an alias moves. An
alias consists of letters, ``-`` and ``_``, while nearly every version contains a digit. Each target detects the rare
version whose name has the form of an alias.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import ClassVar, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.release.publish.content import ReleaseFile
from mergegate.tasks.release.publish.settings import PublishSettings
from mergegate.tasks.release.publish.signing import private_key

FIRST = "first"  # names the oldest release
ALIAS_NAME = r"^[A-Za-z][A-Za-z_-]{0,63}$"
_ALIAS_SETTING = "shadow.alias"

OnProgress = Callable[[int, int], None]
"""Callback that receives the number of bytes transferred so far and in total."""


@dataclass(frozen=True)
class PublishRequest:
    """A release to publish."""

    files: tuple[ReleaseFile, ...]
    name: str  # of the release in the profile
    version: str
    root: Path  # directory of the profile, where relative paths start
    hashes: HashMemo  # cached sha256 digests of files
    expected_head: str | None = None  # head of the release that this one was compared with. None: accept any head.
    on_progress: OnProgress = lambda sent, total: None

    def progress(self, total: int) -> Callable[[int], None]:
        """Return a function that takes the size of what was sent, from any thread. ``total`` bytes will be sent."""
        sent, lock = 0, Lock()

        def report(count: int) -> None:
            nonlocal sent
            with lock:
                sent += count
                self.on_progress(sent, total)

        return report


@dataclass(frozen=True)
class Release:
    """A published release. ``new`` is false if it had been published before and nothing changed."""

    name: str
    version: str
    location: Path | str  # a directory, or the URL of a page
    label: str  # short form of the location, for people
    new: bool

    def summary(self) -> str:
        return f"{self.version} at {self.label}" if self.new else f"{self.version} is released already"


@dataclass(frozen=True)
class CurrentRelease:
    """The current release, downloaded to this machine."""

    directory: Path  # of the complete checkpoint
    # State of the target, as a commit or another identifier of the target's own. If it has changed when ``publish``
    # receives it as ``expected_head``, nothing is published. None: the target has no such state.
    head: str | None = None
    version: str = ""  # version name. Empty: the name of ``directory``.
    location: Path | str | None = None  # published location, as in ``Release``. None: ``directory``.
    complete: bool = True  # whether the publication was completed. If not, publishing again completes it.

    @property
    def name(self) -> str:
        return self.version or self.directory.name


class PublishedRelease(Protocol):
    """A published release that can be read. ``version`` is its version name if that is a content hash, or None."""

    @property
    def reference(self) -> str: ...  # names the release in messages
    @property
    def version(self) -> str | None: ...
    def files(self) -> Mapping[str, tuple[int, str]]: ...  # name -> size in bytes, sha256
    def read(self, name: str) -> bytes: ...
    def download(self) -> Path: ...  # a local directory with all of its files


class CredentialUse(BaseModel):
    """Credential that a publication will use at one place, without any secret."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    place: str  # of the release, such as a repository
    kind: Literal["token", "block", "oidc"]  # token of the environment, Secret block, or identity of a CI job
    name: str  # environment variable, name of the block, or subject of the identity
    issuer: str = ""  # provider of the OIDC identity. Empty for other credentials.
    can_write: bool | None = None  # whether the target confirms write access. None: the target does not say.
    # Whether an OIDC identity obtains new tokens for as long as the run takes. None: other credentials.
    renewable: bool | None = None

    def summary(self) -> str:
        credential = {
            "token": f"the token of {self.name}",
            "block": f"the Secret block {self.name}",
            "oidc": f"the OIDC identity {self.name} of {self.issuer}",
        }[self.kind]
        permission = "which may write" if self.can_write else "whose write access the target does not confirm"
        limit = "; it cannot be renewed after its id token expires" if self.renewable is False else ""
        return f"publish: {self.place} with {credential}, {permission}{limit}"


class PublishTarget(PublishSettings, ABC):
    """Base class of all targets."""

    reference_form: ClassVar[str]
    """Form of a reference to a release at this target, for messages: 'the directory of a release'."""

    current_is_local: ClassVar[bool] = False
    """Whether ``current_release`` only reads local files, and never downloads a release."""

    @property
    def is_public(self) -> bool:
        """Whether outsiders can see a release, so that its licenses must have been checked for redistribution."""
        return False

    @property
    @abstractmethod
    def address(self) -> str:
        """Reference in the model card for ``mergegate verify``, or '.' for a local directory."""

    @abstractmethod
    def check(self, root: Path) -> CredentialUse | None:
        """Raise an error if publishing would fail for a reason that can be known now. Leave no trace at the target.

        ``root`` is the directory of the profile, where relative paths start.

        Returns:
            Credential that a publication will use, for ``mergegate check``. None: the target does not name one.

        Raises:
            InvalidInput: A prerequisite, such as a token, is missing.
            Refused: The target denies write access or is unavailable.
        """

    @abstractmethod
    def current_release(self, root: Path) -> CurrentRelease | None:
        """Return the current release, or None before the first.

        Raise Refused if the target is unavailable, because no merge may pass without a comparison with its champion.
        """

    def earlier_release(self, root: Path, version: str) -> CurrentRelease | None:
        """Return an earlier release for use as the anchor, or None before the first.

        ``version`` is ``first`` for the oldest release, or a version name.

        Raises:
            InvalidInput: There is no such version, or the target does not keep earlier releases.
            Refused: The target is unavailable.
        """
        found = f"{version!r}, but the target {self.target_name} does not keep earlier releases"
        raise _unsupported("evaluate.anchor", found, "keeps", "remove 'anchor'")

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Point the alias ``name`` to the published ``version``. Idempotent; changes no release.

        Raises:
            InvalidInput: There is no such version, ``name`` is a version or not a valid alias, or the target does not
                support aliases.
            Refused: The target rejects the request or is unavailable.
        """
        found = f"{name!r}, but the target {self.target_name} does not support aliases"
        raise _unsupported(_ALIAS_SETTING, found, "supports", "set 'alias: null'")

    def resolve_alias(self, root: Path, name: str) -> str | None:
        """Return the version that the alias ``name`` points to, or None. Raise Refused if the target is unavailable."""
        return None

    @property
    def target_name(self) -> str:
        return str(getattr(self, "to", type(self).__name__))

    @property
    def hub_id(self) -> str | None:
        """Id ``org/name`` of the repository on the Hub that holds the releases, or None."""
        return None

    def reference_to(self, version: str) -> str:
        """Return the reference to a release for ``mergegate verify``, as written in the place of its variants."""
        return f"{self.address}@{version}"

    def current_head(self, root: Path) -> str | None:
        """Return the head of the current release (see ``CurrentRelease``), or None before the first.

        Targets override this if they can tell it without downloading the release. Raise Refused if the target is
        unavailable.
        """
        current = self.current_release(root)
        return current.head or current.name if current else None

    def for_variants(self, suffix: str) -> PublishTarget:
        """Return the target of quantized variants: a place next to this one, whose name ends with ``-suffix``.

        The place has releases, a current release and aliases of its own.

        Raises:
            InvalidInput: The target does not support variants, or a place with this name is not possible.
        """
        found = f"the target {self.target_name} does not support variants"
        raise _unsupported("variants", found, "supports", "remove 'variants' from the profile")

    def _require_alias_name(self, name: str, *reserved_names: str) -> None:
        """Raise InvalidInput if ``name`` could be a version, or the target uses it itself, such as ``latest``."""
        remedy = "choose another name, such as 'production'"
        if name in reserved_names:
            found = f"{name!r}, which the target itself moves with every release"
            raise InvalidInput(
                _ALIAS_SETTING, found=found, expected="a name that the target does not use", remedy=remedy
            )
        if not re.fullmatch(ALIAS_NAME, name):
            expected = "only letters, '-' and '_', because a name with digits would look like a version"
            raise InvalidInput(_ALIAS_SETTING, found=repr(name), expected=expected, remedy=remedy)

    def _alias_conflict(self, name: str, location: str = "") -> InvalidInput:
        """Return the error for an alias ``name`` that is already a version. Default location: ``address``."""
        return InvalidInput(
            _ALIAS_SETTING,
            found=f"{name!r}, which is a version at {location or self.address}",
            expected="a name that is not the name of a version",
            remedy="choose another name for the alias",
        )

    def _no_such_version(self, version: str, versions: Collection[str] = (), location: str = "") -> InvalidInput:
        """Return the error for an alias to a ``version`` that does not exist."""
        return InvalidInput(
            _ALIAS_SETTING,
            found=f"no version {version!r} at {location or self.address}",
            expected="a version that was published there",
            remedy=suggest(version, versions) or "check the spelling",
        )

    def _no_such_anchor(self, version: str, versions: Collection[str], location: str = "") -> InvalidInput:
        return InvalidInput(
            "evaluate.anchor",
            found=f"{version!r} is not a version at {location or self.address}",
            expected=f"{FIRST!r}, or one of its versions",
            remedy=suggest(version, [FIRST, *versions]),
        )

    def _with_settings(self, suffix: str, **settings: object) -> Self:
        """Return a copy with other settings. Raise InvalidInput if they are not valid because of ``suffix``."""
        try:
            return self.model_validate({**self.model_dump(), **settings})
        except ValidationError as error:
            name, value = next(iter(settings.items()))
            raise InvalidInput(
                f"variants: suffix {suffix!r}",
                found=f"publish.{name} would be {str(value)!r}: {error.errors()[0]['msg']}",
                expected=f"a suffix that gives a valid {name} at the target {self.target_name}",
                remedy="set another 'suffix' for this entry of 'variants'",
            ) from None

    @abstractmethod
    def publish(self, request: PublishRequest) -> Release:
        """Publish exactly the files of ``request`` under its version, and make that the current version.

        The publication is atomic: after a kill, running again completes it. If the release is already published,
        nothing changes. A version never changes its content.

        Raises:
            Refused: The version exists with different content, a source file has changed since the gate, the target's
                head is not ``expected_head``, or the target rejects the request.
        """

    def published_file(self, root: Path, version: str, name: str) -> bytes | None:
        """Return a small file of a published version, or None without such a version or file.

        Targets override this if they can read one file without listing the others. Raise Refused if the target is
        unavailable.
        """
        try:
            release = self.open(self.reference_to(version))
        except InvalidInput:
            return None
        return release.read(name) if release is not None and name in release.files() else None

    @classmethod
    @abstractmethod
    def open(cls, reference: str) -> PublishedRelease | None:
        """Open a release by a user's reference, without a profile. Return None if the reference has another form.

        Raise InvalidInput if there is no such release, and Refused if the target is unavailable.
        """


def _unsupported(setting: str, found: str, verb: str, change: str) -> InvalidInput:
    expected = f"a target that {verb} them, such as a directory or the Hub"
    return InvalidInput(setting, found=found, expected=expected, remedy=f"{change}, or publish to another target")


def check_target(
    target: PublishTarget | None,
    root: Path,
    suffixes: Sequence[str] = (),
    collect_errors: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[CredentialUse, ...]:
    """Check the signing key, then the target and each place of variants, and raise an error if publishing would fail.

    Args:
        target: Target to check, or None if nothing is published.
        root: Directory of the profile, where relative paths start.
        suffixes: Suffixes of the places of quantized variants.
        collect_errors: Context in which each place is checked. It may record an error instead of raising it.

    Returns:
        Credentials of the places that passed.

    Raises:
        InvalidInput: The signing key is missing, two places are the same, or a setting of a place is invalid.
        Refused: A place denies write access or is unavailable.
    """
    if target is None:
        return ()
    if target.sign_key is not None:
        private_key(root / target.sign_key)
    places = [target, *(target.for_variants(suffix) for suffix in suffixes)]
    # A registry has lowercase names only, so two suffixes may give the same name.
    for suffix, place in zip(suffixes, places[1:], strict=True):
        if places.count(place) > 1:
            raise InvalidInput(
                f"variants: suffix {suffix!r}",
                found=f"another entry would be published to the same place, {place.address}",
                expected="a place of its own for each entry",
                remedy="set another 'suffix' for one of them",
            )
    credentials = []
    for place in places:
        with collect_errors():
            credentials.append(place.check(root))
    return tuple(credential for credential in credentials if credential)
