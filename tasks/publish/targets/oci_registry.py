"""Access a repository of an OCI registry by the distribution specification 1.1, without a client library.

Credentials come from ``$DOCKER_CONFIG/config.json``, where ``docker login`` or ``oras login`` stored them. They are
sent only to the registry, or to the token service that the registry names, over TLS or the loopback interface.
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
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.parsing import read_plain
from mergegate.tasks.http import TRANSIENT_STATUSES, retry_transient

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
REPOSITORY = r"[a-z0-9.-]+(?::\d+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)+"
_ATTEMPTS = 6
TIMEOUT_S = 60.0

_MAX_MESSAGE_LENGTH = 300
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


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
        """URL of the repository in the registry's API."""
        scheme = "http" if self.plain or _is_loopback(self.host) else "https"
        return f"{scheme}://{self.host}/v2/{self.repository.partition('/')[2]}"

    def manifest(self, reference: str) -> tuple[bytes, str] | None:
        """Return a manifest by tag or digest, and its digest, or None if there is no such manifest.

        Raise Refused if the registry rejects the request, does not answer, or returns bytes that do not match the
        digest.
        """
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
        """Return whether the registry has the blob."""
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

    def put_blob(self, digest: str, source: Path | bytes, size: int) -> str:
        """Upload a blob and return the digest of the sent bytes. The registry discards them if it is not ``digest``."""

        def put_blob() -> str:
            upload = self._send("POST", "/blobs/uploads/", content=b"")
            self._require_status(upload, (202,))
            body = _HashedBody(source)
            url = upload.headers["location"]
            answer = self._send(
                "PUT",
                f"{url}{'&' if '?' in url else '?'}digest={digest}",
                content=iter(body),
                headers={"Content-Type": "application/octet-stream", "Content-Length": str(size)},
            )
            if body.digest in ("", digest):
                self._require_status(answer, (201,))
            return body.digest

        return self._retry(put_blob)

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


class _HashedBody:
    """Request body that is hashed while it is sent."""

    def __init__(self, source: Path | bytes) -> None:
        self._source, self.digest = source, ""

    def __iter__(self) -> Iterator[bytes]:
        digest = hashlib.sha256()
        if isinstance(self._source, bytes):
            digest.update(self._source)
            yield self._source
        else:
            with self._source.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
                    yield chunk
        self.digest = f"sha256:{digest.hexdigest()}"


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
