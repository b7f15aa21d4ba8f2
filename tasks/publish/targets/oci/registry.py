"""A repository in a registry, by the OCI distribution specification 1.1: a dozen requests, so no client is needed.

Who we are is what ``docker login`` (or ``oras login``) has written into ``$DOCKER_CONFIG/config.json``. It is sent to
the registry, or to the token service that the registry names, over TLS or on the loopback only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.parsing import read_plain
from mergegate.tasks.http import TRANSIENT_STATUSES, retry_transient

if TYPE_CHECKING:
    import httpx

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
REPOSITORY = r"[a-z0-9.-]+(?::\d+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)+"
_ATTEMPTS = 6
TIMEOUT_S = 60.0
_MOST_MANIFEST = 4 << 20  # what the specification asks a registry to take
_LONGEST_MESSAGE = 300
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class NoAnswer(Exception):
    """The registry did not answer, or with a status that may pass. The message says what, without any header."""


@dataclass
class Registry:
    """``host/name``. Every request is asked again while that may help: all of them may be done twice.

    Args:
        repository: With the host before the first slash.
        plain: Speak HTTP; on the loopback that is done anyway.
    """

    repository: str
    plain: bool = False
    _headers: dict[str, str] = field(default_factory=dict)

    @property
    def host(self) -> str:
        return self.repository.partition("/")[0]

    @property
    def url(self) -> str:
        """Of the repository's part of the protocol."""
        scheme = "http" if self.plain or _is_loopback(self.host) else "https"
        return f"{scheme}://{self.host}/v2/{self.repository.partition('/')[2]}"

    def manifest(self, reference: str) -> tuple[bytes, str] | None:
        """A manifest by its tag or digest, and its digest; None where there is none.

        Raises:
            Refused: when the registry says no, does not answer, or hands out other bytes than were asked for.
        """
        answer = self.ask("GET", f"/manifests/{reference}", headers={"Accept": MANIFEST_TYPE}, fine=(200, 404))
        if answer.status_code == 404:
            return None
        digest = digest_of(answer.content)
        if ":" in reference and digest != reference:
            raise Refused(f"{self.repository}@{reference}", found=f"other bytes ({digest})", expected="its digest")
        return answer.content, digest

    def put_manifest(self, reference: str, content: bytes) -> None:
        """Write a manifest; the registry refuses it as long as it lacks one of its blobs."""
        self.ask(
            "PUT", f"/manifests/{reference}", headers={"Content-Type": MANIFEST_TYPE}, content=content, fine=(201,)
        )

    def has(self, digest: str) -> bool:
        """Whether it holds the blob."""
        return self.ask("HEAD", f"/blobs/{digest}", fine=(200, 404)).status_code == 200

    def blob(self, digest: str) -> bytes:
        """A small blob, compared with its digest."""
        content = self.ask("GET", f"/blobs/{digest}", fine=(200,)).content
        if digest_of(content) != digest:
            raise Refused(f"{self.repository}@{digest}", found="other bytes", expected="its digest")
        return content

    def download(self, digest: str, place: Path) -> None:
        """A blob into a file; it is the caller's to be compared."""

        def get() -> None:
            with (
                _in_words(),
                self._client.stream("GET", f"{self.url}/blobs/{digest}", headers=self._headers) as answer,
                place.open("wb") as file,
            ):
                if answer.status_code != 200:
                    raise NoAnswer(f"HTTP {answer.status_code}")
                for chunk in answer.iter_bytes(1 << 20):
                    file.write(chunk)

        self.has(digest)  # which gets us a token, where one is wanted
        self._patiently(get)

    def put_blob(self, digest: str, source: Path | bytes, size: int) -> str:
        """Send a blob. Returns the digest of what was read; the registry keeps nothing that has another than said."""

        def put() -> str:
            begun = self._once("POST", "/blobs/uploads/", content=b"")
            self._require(begun, (202,))
            read = _Hashed(source)
            place = begun.headers["location"]
            sent = self._once(
                "PUT",
                f"{place}{'&' if '?' in place else '?'}digest={digest}",
                content=iter(read),
                headers={"Content-Type": "application/octet-stream", "Content-Length": str(size)},
            )
            if sent.status_code != 201 and read.digest not in ("", digest):
                return read.digest
            self._require(sent, (201,))
            return read.digest

        done: str = self._patiently(put)
        return done

    def try_upload(self) -> None:
        """Begin an upload and take it back: the right to write, and no trace."""
        begun = self.ask("POST", "/blobs/uploads/", content=b"", fine=(202,))
        with suppress(Refused):
            self.ask("DELETE", begun.headers["location"], fine=range(200, 500))

    def ask(self, method: str, path: str, *, fine: Any, **options: Any) -> httpx.Response:
        """A request, answered with a status among ``fine``."""

        def once() -> httpx.Response:
            answer = self._once(method, path, **options)
            self._require(answer, fine)
            return answer

        answer: httpx.Response = self._patiently(once)
        return answer

    def _patiently(self, ask: Any) -> Any:
        try:
            return retry_transient(
                _ATTEMPTS,
                transient=lambda error: isinstance(error, NoAnswer),
                sleep=lambda seconds: time.sleep(seconds),
            )(ask)
        except NoAnswer as error:
            raise Refused(
                self.repository,
                found=f"the registry does not answer as it should: {error}",
                expected="a registry that answers",
                remedy="run again later: it resumes where it left off",
            ) from None

    def _require(self, answer: httpx.Response, fine: Any) -> None:
        if answer.status_code in fine:
            return
        if answer.status_code in TRANSIENT_STATUSES:
            raise NoAnswer(f"HTTP {answer.status_code}")
        said = f"HTTP {answer.status_code} {_complaint(answer)}".strip()
        if answer.status_code in (401, 403):
            raise Refused(
                self.repository,
                found=f"the registry says no: {said}",
                expected="the right to read and write there",
                remedy=f"docker login {self.host}, as somebody who may",
            )
        raise Refused(
            self.repository, found=said, expected="a registry that takes a release", remedy="see what it says"
        )

    def _once(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request; with a token, where the registry asks for one."""
        url = path if "://" in path else f"{self._root}{path}" if path.startswith("/v2/") else self.url + path
        headers = {**options.pop("headers", {}), **(self._headers if self._is_ours(url) else {})}
        client = self._client
        with _in_words():
            answer = client.request(method, url, headers=headers, **options)
            challenge = answer.headers.get("www-authenticate", "")
            if answer.status_code != 401 or not challenge or self._headers.get("Authorization") == "refused":
                return answer
            if not (proof := self._proof(challenge, client)) or proof == self._headers.get("Authorization"):
                return answer
            self._headers["Authorization"] = proof
            if "content" in options and not isinstance(options["content"], bytes):
                raise NoAnswer("a token had run out")  # what was read must be read anew
            return client.request(method, url, headers={**headers, **self._headers}, **options)

    @property
    def _root(self) -> str:
        return self.url.partition("/v2/")[0]

    def _is_ours(self, url: str) -> bool:
        return urlsplit(url)[:2] == urlsplit(self._root)[:2]

    def _proof(self, challenge: str, client: httpx.Client) -> str:
        """What the registry wants to see: our name and password, or a token from the service that it names."""
        known = _login(self.host)
        basic = f"Basic {base64.b64encode(known.encode()).decode()}" if known else ""
        if challenge.lower().startswith("basic"):
            return basic
        said = dict(_CHALLENGE.findall(challenge))
        realm = urlsplit(said.get("realm", ""))
        if realm.scheme != "https" and not _is_loopback(realm.netloc):
            return ""
        answer = client.get(
            said["realm"],
            params={name: said[name] for name in ("service", "scope") if name in said},
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


class _Hashed:
    """A source that is hashed as it is sent."""

    def __init__(self, source: Path | bytes) -> None:
        self._source, self.digest = source, ""

    def __iter__(self) -> Iterator[bytes]:
        running = hashlib.sha256()
        if isinstance(self._source, bytes):
            running.update(self._source)
            yield self._source
        else:
            with self._source.open("rb") as file:
                while chunk := file.read(1 << 20):
                    running.update(chunk)
                    yield chunk
        self.digest = f"sha256:{running.hexdigest()}"


def digest_of(content: bytes) -> str:
    """As registries write it."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@contextmanager
def _in_words() -> Iterator[None]:
    """Errors of the client carry their request, and the request our token: of them only the kind leaves here."""
    import httpx

    try:
        yield
    except httpx.TimeoutException:
        raise NoAnswer(f"no answer in {TIMEOUT_S:g} s") from None
    except httpx.HTTPError as error:
        raise NoAnswer(f"the connection broke ({type(error).__name__})") from None


def _login(host: str) -> str:
    """``user:password`` for the registry; empty: none is known."""
    place = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    try:
        auths = json.loads(read_plain(place, 1 << 20))["auths"]
        entry = auths.get(host) or auths.get(f"https://{host}") or {}
        return base64.b64decode(entry.get("auth", "")).decode()
    except (InvalidInput, OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def _is_loopback(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    return name in ("localhost", "::1") or name.startswith("127.")


def _complaint(answer: httpx.Response) -> str:
    with suppress(ValueError, KeyError, TypeError, IndexError):
        first = answer.json()["errors"][0]
        return " ".join(f"{first.get('code', '')} {first.get('message', '')}".split())[:_LONGEST_MESSAGE]
    return ""
