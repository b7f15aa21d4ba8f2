"""Define the OCI target: content-addressed blobs, one manifest, a tag for the version, and the moving tag ``latest``.

The digest of the manifest identifies the release: the same files give the same digest for every publisher. A registry
rejects a manifest whose blobs are missing and a blob whose hash differs from its name, so a tag always points to a
complete release.

**Writing a tag has no guard**, because registries ignore ``If-Match``. If two publishers read ``latest`` before either
writes it, the last one wins, and neither is notified. mergegate reduces the risk: it reads ``latest`` directly before
and after it writes, and writes a version's tag only if it does not exist. If that is not enough, publish from one place
or to a target with guarded writes (S3, the Hub).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import Field

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.parsing import read_plain
from mergegate.tasks.base.http import TRANSIENT_STATUSES, retry_transient
from mergegate.tasks.release.publish.content import (
    MAX_METADATA_BYTES,
    VERSION_DIGITS,
    ReleaseFile,
    content_digest,
    file_identities,
    is_content_version,
    sha256_of,
)
from mergegate.tasks.release.publish.targets.contract import (
    FIRST,
    CurrentRelease,
    PublishRequest,
    PublishTarget,
    Release,
)
from mergegate.tasks.release.publish.targets.download import download_release
from mergegate.tasks.release.publish.targets.reconcile import Publication, PublicationBlocked, overtaken, version_taken

if TYPE_CHECKING:
    import httpx

REPOSITORY = r"[a-z0-9.-]+(?::\d+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)+"
_NAME = re.compile(
    rf"oci://(?P<repository>{REPOSITORY})(?:[:](?P<tag>[\w.-]+))?(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?"
)
_LATEST = "latest"
_ARTIFACT_TYPE = "application/vnd.mergegate.release.v1"
_TITLE = "org.opencontainers.image.title"
_VERSION = "org.opencontainers.image.version"
_EMPTY = b"{}"  # content of the config blob, which the specification requires
_SHOWN_DIGITS = 19  # leading characters of a digest in a message: 'sha256:' and 12 digits
T = TypeVar("T")
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_ATTEMPTS = 6
TIMEOUT_S = 60.0
_MAX_MESSAGE_LENGTH = 300
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class OciTarget(PublishTarget):
    """A repository in an OCI registry. A release is a manifest, named by its digest; versions and ``latest`` are tags.

    Credentials come from ``docker login``. Tags have no guard against a second publisher.
    """

    reference_form: ClassVar[str] = "oci://registry/name:version or @sha256:…"

    to: Literal["oci"]
    repository: str = Field(
        pattern=f"^{REPOSITORY}$", description="Repository registry/name, such as ghcr.io/acme/demo."
    )
    plain_http: bool = Field(
        default=False,
        description="Use HTTP without TLS. Always the case on the loopback interface. Default: false.",
    )

    @property
    def address(self) -> str:
        return f"oci://{self.repository}"

    def check(self, root: Path) -> None:
        """Raise an error if the registry denies write access. This starts and cancels an upload."""
        registry = self._registry()
        upload = registry.ask("POST", "/blobs/uploads/", content=b"", expected=(202,))
        with suppress(Refused):
            registry.ask("DELETE", upload.headers["location"], expected=range(200, 500))

    def current_release(self, root: Path) -> CurrentRelease | None:
        """Download the release tagged ``latest``. Its ``head`` is the digest of the manifest."""
        return self._download(_LATEST)

    def earlier_release(self, root: Path, version: str) -> CurrentRelease | None:
        """Download the release with a version's tag. ``first`` is not supported, because tags have no order."""
        if version == FIRST:
            raise Refused(
                "evaluate.anchor",
                found=f"{FIRST!r}, but a registry does not store the order of its tags",
                expected="the name of a version",
                remedy="set 'anchor' to the name of a version",
            )
        if (release := self._download(version)) is None and self._registry().manifest(_LATEST) is not None:
            raise InvalidInput(
                "evaluate.anchor", found=f"no tag {version!r} at {self.address}", expected="one of its tags"
            )
        return release

    def current_head(self, root: Path) -> str | None:
        manifest = self._registry().manifest(_LATEST)
        return manifest[1] if manifest else None

    def reference_to(self, version: str) -> str:
        return f"{self.address}:{version}"

    def for_variants(self, suffix: str) -> OciTarget:
        """Return the repository next to this one, such as ``ghcr.io/acme/demo-gguf``. Its name is lowercase."""
        return self._with_settings(suffix, repository=f"{self.repository}-{suffix.lower()}")

    def publish(self, request: PublishRequest) -> Release:
        """Upload the blobs, then write the manifest under the version's tag and under ``latest``."""
        version, expected_head = request.version, request.expected_head
        if version == _LATEST:
            raise InvalidInput(
                "publish.version",
                found=repr(version),
                expected="another name, because this tag moves with every release",
                remedy="choose another name for the version",
            )
        publication = _OciPublication(request, self._registry())
        _, steps = publication.run(expected_head)
        location = f"{self.address}@{publication.digest}"
        return Release(request.name, version, location, self.address, new=bool(steps))

    def published_file(self, root: Path, version: str, name: str) -> bytes | None:
        """Return a small file of the manifest with a version's tag, or None."""
        registry = self._registry()
        if (manifest := registry.manifest(version)) is None:
            return None
        _, files = parse_manifest(manifest[0], self.reference_to(version))
        return OciRelease(registry, manifest[1], None, files).read(name) if name in files else None

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Tag the version's manifest with ``name``. Like ``latest``, this tag has no guard."""
        self._require_alias_name(name, _LATEST)
        registry = self._registry()
        desired, current = registry.manifest(version), registry.manifest(name)
        if desired is None or _manifest_version(desired[0]) != version:
            raise self._no_such_version(version)
        if current is not None and _manifest_version(current[0]) in ("", name):
            raise self._alias_conflict(name)
        if current != desired:
            registry.put_manifest(name, desired[0])

    def resolve_alias(self, root: Path, name: str) -> str | None:
        manifest = self._registry().manifest(name)
        return (_manifest_version(manifest[0]) or None) if manifest else None

    @classmethod
    def open(cls, reference: str) -> OciRelease | None:
        """Open ``oci://registry/name`` with a tag or a digest. Default: the tag ``latest``."""
        if not (match := _NAME.fullmatch(reference)):
            return None
        registry = Registry(match["repository"])
        if (manifest := registry.manifest(match["digest"] or match["tag"] or _LATEST)) is None:
            raise InvalidInput(
                reference,
                found="no such tag or digest in the registry",
                expected="a release",
                remedy="check the spelling",
            )
        _, files = parse_manifest(manifest[0], reference)
        tag = match["tag"] or ""
        return OciRelease(registry, manifest[1], tag if is_content_version(tag) else None, files)

    def _registry(self) -> Registry:
        return Registry(self.repository, self.plain_http)

    def _download(self, tag: str) -> CurrentRelease | None:
        registry = self._registry()
        if (manifest := registry.manifest(tag)) is None:
            return None
        _, files = parse_manifest(manifest[0], f"{self.address}:{tag}")
        version = content_digest(files)[:VERSION_DIGITS]
        directory = OciRelease(registry, manifest[1], version, files).download()
        return CurrentRelease(directory, manifest[1], version, f"{self.address}@{manifest[1]}")


@dataclass(frozen=True)
class OciRelease:
    """A release in a registry. ``version`` is the tag with which it was opened if that is a content hash, or None."""

    registry: Registry
    digest: str
    version: str | None
    _files: Mapping[str, tuple[int, str]]

    @property
    def reference(self) -> str:
        return f"oci://{self.registry.repository}@{self.digest[:_SHOWN_DIGITS]}"

    def files(self) -> Mapping[str, tuple[int, str]]:
        """Return size and sha256 of every file, as the registry verified them. Raise Refused if a blob is missing."""
        for name, (_, sha256) in self._files.items():
            if not self.registry.has(f"sha256:{sha256}"):
                raise Refused(self.reference, found=f"the blob of {name} is missing", expected="all of its blobs")
        return self._files

    def read(self, name: str) -> bytes:
        size, sha256 = self._files.get(name, (0, ""))
        if not sha256 or size > MAX_METADATA_BYTES:
            problem = f"{size} bytes" if sha256 else "the file is missing"
            raise Refused(f"{self.reference}: {name}", found=problem, expected="a small file")
        return self.registry.blob(f"sha256:{sha256}")

    def download(self) -> Path:
        """Return a directory with the release. Raise Refused if its blobs differ from the manifest."""

        def fetch(name: str, path: Path) -> None:
            self.registry.download(f"sha256:{self._files[name][1]}", path)

        return download_release(self.reference, self._files, fetch)


def release_manifest(version: str, files: Mapping[str, tuple[int, str]]) -> bytes:
    """Return the manifest of a release: one layer per file, titled with the file's name.

    ``files`` holds the size in bytes and the sha256 of each file, by name. The same files give the same bytes.
    """
    layers = [
        {
            "mediaType": "application/octet-stream",
            "digest": f"sha256:{sha256}",
            "size": size,
            "annotations": {_TITLE: name},
        }
        for name, (size, sha256) in sorted(files.items())
    ]
    empty_type = "application/vnd.oci.empty.v1+json"
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": _ARTIFACT_TYPE,
        "config": {"mediaType": empty_type, "digest": digest_of(_EMPTY), "size": len(_EMPTY)},
        "layers": layers,
        "annotations": {_VERSION: version},
    }
    return json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()


def parse_manifest(content: bytes, location: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """Return the version, and size in bytes and sha256 of each file. Raise Refused if it is not of a release."""
    try:
        manifest: dict[str, Any] = json.loads(content)
        if manifest["artifactType"] != _ARTIFACT_TYPE:
            raise ValueError(f"its artifactType is {manifest['artifactType']}")
        files = {}
        for layer in manifest["layers"]:
            kind, _, sha256 = str(layer["digest"]).partition(":")
            if kind != "sha256":
                raise ValueError(f"it has a digest of another kind ({kind})")
            files[str(layer["annotations"][_TITLE])] = int(layer["size"]), sha256
        return str(manifest["annotations"][_VERSION]), files
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(
            location, found=f"not a release of mergegate: {error}", expected="a manifest that mergegate wrote"
        ) from None


def _manifest_version(content: bytes) -> str:
    """Return the version in a manifest, or an empty string if mergegate did not write the manifest."""
    with suppress(Refused):
        return parse_manifest(content, "")[0]
    return ""


@dataclass(frozen=True)
class _ObservedTags:
    """Digests of ``latest`` and of the version's tag (empty: no tag), and digests of the missing blobs."""

    latest: str
    version: str
    missing: tuple[str, ...]


_OciWrite = Literal["blobs", "version", "latest"]


@dataclass(frozen=True)
class _OciPublication(Publication[_ObservedTags, _OciWrite]):
    """Requests of one publication."""

    request: PublishRequest
    registry: Registry

    @property
    def address(self) -> str:
        return self.registry.repository

    @cached_property
    def manifest(self) -> bytes:
        return release_manifest(self.request.version, file_identities(self.request.files))

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)

    @cached_property
    def blobs(self) -> dict[str, ReleaseFile]:
        """Files of the release and the content of the config blob, by digest."""
        empty = ReleaseFile("config", len(_EMPTY), sha256_of(_EMPTY), _EMPTY)
        return {f"sha256:{file.sha256}": file for file in (*self.request.files, empty)}

    def observe(self) -> _ObservedTags:
        tags = (_LATEST, self.request.version)
        latest, tagged = (manifest[1] if (manifest := self.registry.manifest(tag)) else "" for tag in tags)
        return _ObservedTags(latest, tagged, tuple(blob for blob in self.blobs if not self.registry.has(blob)))

    def head(self, observed_state: _ObservedTags) -> str:
        return observed_state.latest

    def decide(self, observed_state: _ObservedTags, expected_head: str | None) -> _OciWrite | PublicationBlocked | None:
        if observed_state.version not in ("", self.digest):
            return version_taken(self.request.version, observed_state.version[:_SHOWN_DIGITS])
        if observed_state.latest not in (expected_head, self.digest):
            return overtaken(
                f"another release ({observed_state.latest[:_SHOWN_DIGITS] or 'none'}) is current there now",
                "the release that this one was compared with",
            )
        if observed_state.missing:
            return "blobs"
        if observed_state.version != self.digest:
            return "version"
        return "latest" if observed_state.latest != self.digest else None

    def execute(self, step: _OciWrite, observed_state: _ObservedTags) -> bool:
        if step != "blobs":
            self.registry.put_manifest(self.request.version if step == "version" else _LATEST, self.manifest)
            return True
        missing = [self.blobs[blob] for blob in observed_state.missing]
        report = self.request.progress(sum(file.size for file in missing))
        report(0)
        for file in missing:
            if isinstance(file.source, Path):
                try:
                    size = file.source.stat().st_size
                except OSError:
                    raise file.alteration_error() from None
                if size != file.size:
                    raise file.alteration_error(problem=f"{size} bytes instead of {file.size}")
            self.registry.put_blob(file)
            report(file.size)
        return True


class NoAnswer(Exception):
    """The registry did not answer, or answered with a transient error. The message contains no headers."""


@dataclass
class Registry:
    """A repository ``host/name``. All requests are safe to repeat and are retried after transient errors.

    ``plain`` selects HTTP without TLS, which the loopback interface always uses.
    """

    repository: str
    plain: bool = False
    _headers: dict[str, str] = field(default_factory=dict)

    @property
    def host(self) -> str:
        return self.repository.partition("/")[0]

    @property
    def url(self) -> str:
        scheme = "http" if self.plain or _is_loopback(self.host) else "https"
        return f"{scheme}://{self.host}/v2/{self.repository.partition('/')[2]}"

    def manifest(self, reference: str) -> tuple[bytes, str] | None:
        """Return a manifest by tag or digest, and its digest, or None if there is no such manifest."""
        answer = self.ask("GET", f"/manifests/{reference}", headers={"Accept": MANIFEST_TYPE}, expected=(200, 404))
        if answer.status_code == 404:
            return None
        digest = digest_of(answer.content)
        if ":" in reference and digest != reference:
            raise _wrong_bytes(f"{self.repository}@{reference}")
        return answer.content, digest

    def put_manifest(self, reference: str, content: bytes) -> None:
        """Write a manifest under a tag or digest. The registry rejects it while one of its blobs is missing."""
        headers = {"Content-Type": MANIFEST_TYPE}
        self.ask("PUT", f"/manifests/{reference}", headers=headers, content=content, expected=(201,))

    def has(self, digest: str) -> bool:
        return self.ask("HEAD", f"/blobs/{digest}", expected=(200, 404)).status_code == 200

    def blob(self, digest: str) -> bytes:
        """Return the content of a small blob, verified against its digest."""
        content = self.ask("GET", f"/blobs/{digest}", expected=(200,)).content
        if digest_of(content) != digest:
            raise _wrong_bytes(f"{self.repository}@{digest}")
        return content

    def download(self, digest: str, path: Path) -> None:
        """Download a blob to a file. The caller must verify its digest."""

        def get() -> None:
            with (
                _hidden_requests(),
                self._client.stream("GET", f"{self.url}/blobs/{digest}", headers=self._headers) as answer,
                path.open("wb") as file,
            ):
                if answer.status_code != 200:
                    raise NoAnswer(f"HTTP {answer.status_code}")
                for chunk in answer.iter_bytes(1 << 20):
                    file.write(chunk)

        self.has(digest)  # obtains a token if the registry requires one
        self._retry(get)

    def put_blob(self, file: ReleaseFile) -> None:
        """Upload a file as a blob. Raise Refused if it has changed since the gate; the registry then discards it."""

        def put_blob() -> None:
            upload = self._send("POST", "/blobs/uploads/", content=b"")
            self._require_status(upload, (202,))
            url = upload.headers["location"]
            answer = self._send(
                "PUT",
                f"{url}{'&' if '?' in url else '?'}digest=sha256:{file.sha256}",
                content=file.gated_chunks(1 << 20),
                headers={"Content-Type": "application/octet-stream", "Content-Length": str(file.size)},
            )
            self._require_status(answer, (201,))

        self._retry(put_blob)

    def ask(self, method: str, path: str, *, expected: Collection[int], **options: Any) -> httpx.Response:
        """Send a request and return the answer. Raise Refused if its status is not in ``expected``."""

        def send() -> httpx.Response:
            answer = self._send(method, path, **options)
            self._require_status(answer, expected)
            return answer

        return self._retry(send)

    def _retry(self, request: Callable[[], T]) -> T:
        try:
            return retry_transient(
                _ATTEMPTS,
                transient=lambda error: isinstance(error, NoAnswer),
                sleep=lambda seconds: time.sleep(seconds),
            )(request)
        except NoAnswer as error:
            raise Refused(
                self.repository,
                found=f"the registry does not answer as expected: {error}",
                expected="a valid answer",
                remedy="run again later; mergegate resumes the publication",
            ) from None

    def _require_status(self, answer: httpx.Response, expected: Collection[int]) -> None:
        if answer.status_code in expected:
            return
        if answer.status_code in TRANSIENT_STATUSES:
            raise NoAnswer(f"HTTP {answer.status_code}")
        message = f"HTTP {answer.status_code}"
        with suppress(ValueError, KeyError, TypeError, IndexError):
            error = answer.json()["errors"][0]
            text = " ".join(f"{error.get('code', '')} {error.get('message', '')}".split())
            message += f" {text[:_MAX_MESSAGE_LENGTH]}"
        if answer.status_code in (401, 403):
            raise Refused(
                self.repository,
                found=f"the registry denies access: {message}",
                expected="permission to read and write in the repository",
                remedy=f"run 'docker login {self.host}' as a user with this permission",
            )
        raise Refused(
            self.repository,
            found=message,
            expected="a registry that accepts a release",
            remedy="correct the problem that the registry reports",
        )

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send one request, with a token if the registry requires one."""
        root = self.url.partition("/v2/")[0]
        url = path if "://" in path else f"{root}{path}" if path.startswith("/v2/") else self.url + path
        is_own_url = urlsplit(url)[:2] == urlsplit(root)[:2]
        headers = {**options.pop("headers", {}), **(self._headers if is_own_url else {})}
        client = self._client
        with _hidden_requests():
            answer = client.request(method, url, headers=headers, **options)
            challenge = answer.headers.get("www-authenticate", "")
            if answer.status_code != 401 or not challenge or self._headers.get("Authorization") == "refused":
                return answer
            authorization = self._authorize(challenge)
            if not authorization or authorization == self._headers.get("Authorization"):
                return answer
            self._headers["Authorization"] = authorization
            if "content" in options and not isinstance(options["content"], bytes):
                raise NoAnswer("a token has expired")  # the body is consumed and must be read again
            return client.request(method, url, headers={**headers, **self._headers}, **options)

    def _authorize(self, challenge: str) -> str:
        """Return the Authorization header that the registry requests: basic credentials, or a token."""
        path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
        try:
            logins = json.loads(read_plain(path, 1 << 20))["auths"]
            entry = logins.get(self.host) or logins.get(f"https://{self.host}") or {}
            credentials = base64.b64decode(entry.get("auth", "")).decode()  # user:password
        except (InvalidInput, OSError, ValueError, KeyError, TypeError, AttributeError):
            credentials = ""
        basic = f"Basic {base64.b64encode(credentials.encode()).decode()}" if credentials else ""
        if challenge.lower().startswith("basic"):
            return basic
        parameters = dict(_CHALLENGE.findall(challenge))
        realm = urlsplit(parameters.get("realm", ""))
        if realm.scheme != "https" and not _is_loopback(realm.netloc):
            return ""
        answer = self._client.get(
            parameters["realm"],
            params={name: parameters[name] for name in ("service", "scope") if name in parameters},
            headers={"Authorization": basic} if basic else {},
        )
        if answer.status_code != 200:
            return ""
        body = answer.json()
        token = body.get("token") or body.get("access_token") if isinstance(body, Mapping) else None
        return f"Bearer {token}" if token else ""

    @cached_property
    def _client(self) -> httpx.Client:
        import httpx

        return httpx.Client(
            verify=self.url.startswith("https:"),
            timeout=TIMEOUT_S,
            follow_redirects=True,
            trust_env=not _is_loopback(self.host),
        )


def digest_of(content: bytes) -> str:
    """Return the sha256 of ``content`` in the notation of registries: ``sha256:`` and 64 hex digits."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _wrong_bytes(location: str) -> Refused:
    return Refused(location, found="bytes that do not match the digest", expected="the bytes that the digest names")


@contextmanager
def _hidden_requests() -> Iterator[None]:
    """Replace exceptions of the client by NoAnswer, because their requests contain the token."""
    import httpx

    try:
        yield
    except httpx.TimeoutException:
        raise NoAnswer(f"no answer within {TIMEOUT_S:g} s") from None
    except httpx.HTTPError as error:
        raise NoAnswer(f"the connection broke ({type(error).__name__})") from None


def _is_loopback(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    return name in ("localhost", "::1") or name.startswith("127.")
