"""Exchange the OIDC identity of a CI job for a short-lived Hub token (trusted publishing).

A CI provider states in an id token which job is running. The Hub exchanges it (RFC 8693) for a token that is valid for
an hour: for one repository if the resource is ``org/name``, or for a user's gated repositories if it is a username.

* GitHub Actions issues a new id token at any time, so the Hub token can be renewed for as long as the job runs.
* Other providers issue one id token in advance (``HF_OIDC_ID_TOKEN``). The Hub token cannot be renewed after that id
  token has expired.

Both tokens exist in the memory of this process only. No ``repr`` and no message contains them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from threading import RLock
from typing import Any
from urllib.parse import urlencode

from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.merge_core.wording import detail
from mergegate.tasks.http import exception_chain, is_transient, retry_transient, status_of, token_claims

RESOURCE, ID_TOKEN = "HF_OIDC_RESOURCE", "HF_OIDC_ID_TOKEN"
_REQUEST_URL, _REQUEST_TOKEN = "ACTIONS_ID_TOKEN_REQUEST_URL", "ACTIONS_ID_TOKEN_REQUEST_TOKEN"
_TRIES = 4  # seven seconds of waiting
_LIFETIME_S = 3600.0  # of a Hub token, if the Hub does not state it
_RENEWAL_S = 1800.0  # remaining time below which a token is renewed, so that a long request does not outlive it
_RETRY_S = 60.0  # pause after a failed renewal, while the present token is valid
# Claims that operators configure on the Hub, or that explain why a token is refused.
_SHOWN_CLAIMS = ("iss", "sub", "aud", "repository", "ref", "workflow", "environment", "project_path")


@dataclass(frozen=True)
class OidcIdentity:
    """Claims of an id token. They are not secret, unlike the token."""

    payload: Mapping[str, Any]  # All claims. Their signature is checked by the Hub.

    @property
    def issuer(self) -> str:
        return str(self.payload.get("iss", ""))

    @property
    def subject(self) -> str:
        return str(self.payload.get("sub", ""))

    @property
    def expires_at(self) -> float:
        """End of the token's validity, in seconds since 1970."""
        expires_at = self.payload.get("exp")
        return float(expires_at) if isinstance(expires_at, int | float) else float("inf")

    def is_for(self, audience: str) -> bool:
        """Return whether the service ``audience`` may accept the token."""
        audiences = self.payload.get("aud") or ()
        return audience in ((audiences,) if isinstance(audiences, str) else tuple(map(str, audiences)))

    def claims_text(self) -> str:
        """Return the claims that a trusted publisher can be limited to as ``name=value``, in one line."""
        return ", ".join(f"{name}={self.payload[name]}" for name in _SHOWN_CLAIMS if name in self.payload)


@dataclass
class TrustedPublisher:
    """Hub token for one resource, obtained on first use and renewed before it expires."""

    endpoint: str  # Address of the Hub, which is also the audience of the id token.
    resource: str  # Repository as ``org/name``, or a username.
    # Id token that was issued in advance. Empty: GitHub Actions issues one for each exchange.
    id_token: str = field(default="", repr=False)
    identity: OidcIdentity | None = field(default=None, init=False, repr=False)
    _token: str | None = field(default=None, init=False, repr=False)
    _renew_at: float = field(default=0.0, init=False, repr=False)
    _expires_at: float = field(default=0.0, init=False, repr=False)
    _secrets: set[str] = field(default_factory=set, init=False, repr=False)
    _lock: Any = field(default_factory=RLock, init=False, repr=False)

    @property
    def is_renewable(self) -> bool:
        """Whether the provider issues a new id token at any time."""
        return not self.id_token

    def token(self) -> str:
        """Return a valid Hub token."""
        with self._lock:
            now = time.time()  # It continues while the machine is suspended, unlike the monotonic clock.
            if self._token is None or now >= self._renew_at:
                try:
                    self._token = self._exchange(now)
                except MergegateError as error:
                    if self._token is None or now >= self._expires_at:
                        raise
                    self._renew_at = min(now + _RETRY_S, self._expires_at)
                    detail("trusted publisher of %s: not renewed yet: %s", self.resource, error.found)
            return self._token

    def discard_token(self) -> None:
        """Discard a token that the Hub rejects, so that the next call of ``token`` obtains another one."""
        with self._lock:
            self._token = None

    def mask(self, text: str) -> str:
        """Return ``text`` without any id token and any Hub token of this publisher."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _exchange(self, now: float) -> str:
        from huggingface_hub._oidc import exchange_oidc_token

        id_token = self._issue_id_token(now)

        def exchange() -> tuple[str, float]:
            answer = exchange_oidc_token(subject_token=id_token, resource=self.resource, endpoint=self.endpoint)
            return str(answer["access_token"]), float(answer.get("expires_in") or _LIFETIME_S)

        try:
            with _without_request_bodies():
                token, lifetime = retry_transient(_TRIES, sleep=time.sleep)(exchange)
        except _client_errors() as error:
            raise self._refusal(error) from None
        self._secrets.add(token)
        self._expires_at = now + lifetime
        self._renew_at = self._expires_at - min(_RENEWAL_S, lifetime / 2)
        assert self.identity is not None
        job = f"{self.identity.subject} of {self.identity.issuer}"
        detail("trusted publisher of %s: %s has a token for %d s", self.resource, job, lifetime)
        return token

    def _issue_id_token(self, now: float) -> str:
        from huggingface_hub import get_session, hf_raise_for_status

        id_token, source = self.id_token, ID_TOKEN
        if not id_token:
            source = "the id token of GitHub Actions"
            # The client's own function would drop the query that GitHub's address has (``?api-version=2.0``).
            url, request_token = os.environ.get(_REQUEST_URL, ""), os.environ.get(_REQUEST_TOKEN, "")
            url += f"{'&' if '?' in url else '?'}{urlencode({'audience': self.endpoint})}"

            def request_id_token() -> str:
                answer = get_session().get(url, headers={"Authorization": f"Bearer {request_token}"})
                hf_raise_for_status(answer)
                return str(answer.json()["value"])

            self._secrets |= {request_token} - {""}
            try:
                id_token = retry_transient(_TRIES, sleep=time.sleep)(request_id_token)
            except _client_errors() as error:
                raise Refused(
                    source,
                    found=f"GitHub Actions does not issue it: {self.mask(_describe(error))}",
                    expected="an id token for this job",
                    remedy="run the job again, because the id token endpoint belongs to one job only",
                ) from None
        self._secrets.add(id_token)
        try:
            self.identity = OidcIdentity(token_claims(id_token))
        except ValueError as error:
            raise InvalidInput(
                source,
                found=f"it is not a JSON Web Token: {error}",
                expected="the id token that the CI provider issued for this job",
                remedy="let the provider set it, for example with id_tokens in GitLab's .gitlab-ci.yml",
            ) from None
        if now >= self.identity.expires_at:
            ended = datetime.fromtimestamp(self.identity.expires_at, UTC)
            raise InvalidInput(
                source,
                found=f"the id token expired at {ended:%H:%M} UTC, {(now - self.identity.expires_at) / 60:.0f} min ago",
                expected="an id token that is valid when mergegate checks and when it publishes",
                remedy="run again in a new job, where finished stages are cached. An id token that was issued in "
                "advance cannot be renewed; GitHub Actions issues new ones during a run, and HF_TOKEN needs none",
            )
        return id_token

    def _refusal(self, error: Exception) -> MergegateError:
        location, answer = f"trusted publisher of {self.resource}", self.mask(_describe(error))
        status = next((status for cause in exception_chain(error) if (status := status_of(cause))), None)
        if status in (404, 405):
            return Refused(
                location,
                found=f"{self.endpoint} does not exchange id tokens: {answer}",
                expected="a Hub that supports trusted publishers",
                remedy="export HF_TOKEN, or correct HF_ENDPOINT",
            )
        if status is None or is_transient(error):
            return Refused(
                location,
                found=f"the Hub does not exchange the id token now: {answer}",
                expected="a token for this job",
                remedy="check HF_ENDPOINT and the network, or run again later",
            )
        assert self.identity is not None
        settings = f"{self.endpoint}/{self.resource}/settings"
        if not self.identity.is_for(self.endpoint):
            remedy = f"request the id token with the audience {self.endpoint}"
        elif "/" not in self.resource:
            remedy = f"add a publisher with these claims to CI/CD Access on {self.endpoint}/settings/authentication"
        elif self._is_public():
            remedy = f"add a trusted publisher with these claims on {settings}"
        else:
            remedy = (
                "create the repository if it does not exist, because only an existing one has trusted publishers. "
                f"Then add one with these claims on {settings}"
            )
        return Refused(
            location,
            found=f"the Hub does not exchange the id token: {answer}. Its claims: {self.identity.claims_text()}",
            expected=f"an existing {'repository' if '/' in self.resource else 'user'} with a trusted publisher whose "
            f"claims all match exactly, and the audience {self.endpoint}",
            remedy=remedy,
        )

    def _is_public(self) -> bool:
        """Return whether anyone can see the repository. The Hub does not say why it refuses an exchange."""
        from huggingface_hub import HfApi

        try:
            HfApi(endpoint=self.endpoint, token=False, library_name="mergegate").model_info(self.resource)
        except _client_errors():
            return False
        return True


def find_publisher(endpoint: str, resource: str) -> TrustedPublisher | None:
    """Return the publisher for a resource with the OIDC identity of this process, or None if it has no identity."""
    id_token = os.environ.get(ID_TOKEN, "").strip()
    if id_token:
        return _publisher(endpoint, resource, id_token, "")
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return None
    url, request_token = os.environ.get(_REQUEST_URL, ""), os.environ.get(_REQUEST_TOKEN, "")
    if not (url and request_token):
        raise InvalidInput(
            f"trusted publisher of {resource}",
            found="GitHub Actions does not let this job request an id token",
            expected="a job with the permission to write id tokens, which a pull request from a fork never has",
            remedy="add 'permissions: {id-token: write, contents: read}' to the job. Otherwise, export HF_TOKEN, or "
            "set publish.token_block to a Prefect Secret block",
        )
    return _publisher(endpoint, resource, "", f"{url} {request_token}")


@lru_cache(maxsize=32)
def _publisher(endpoint: str, resource: str, id_token: str, _source: str) -> TrustedPublisher:
    """Return the one publisher of this process for a resource, so that its operations share the Hub token."""
    return TrustedPublisher(endpoint, resource, id_token)


def _client_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HTTPError, OIDCError  # type: ignore[attr-defined]  # httpx or httpx2

    # ValueError and LookupError mean that the answer is not the expected JSON.
    return (HTTPError, OIDCError, OSError, ValueError, LookupError, TypeError)


def _describe(error: Exception) -> str:
    """Return the status and the OAuth error of an answer, or the reason why there is none, in one line."""
    for cause in exception_chain(error):
        if (status := status_of(cause)) is not None:
            try:
                answer = cause.response.json()  # type: ignore[attr-defined]  # only such causes have a status
                words = [str(answer[name]) for name in ("error", "error_description") if answer.get(name)]
            except (ValueError, AttributeError, TypeError):
                words = []
            return f"{status} {': '.join(words)}".strip()
    if isinstance(error, ValueError | LookupError | TypeError):
        return "the answer is not the expected JSON"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _without_request_bodies() -> Iterator[None]:
    """Keep the client from logging requests with their bodies. ``HF_DEBUG`` would show the beginning of id tokens."""
    logger = logging.getLogger("huggingface_hub.utils._http")

    def has_no_body(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Send:")

    logger.addFilter(has_no_body)
    try:
        yield
    finally:
        logger.removeFilter(has_no_body)
