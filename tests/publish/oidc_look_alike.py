"""Model the OIDC side of the Hub stand-in: a CI provider that issues id tokens, and the exchange for Hub tokens."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jwt

GITHUB = "https://token.actions.githubusercontent.com"
REQUEST_TOKEN = "ghs_request_token_of_this_job"
CLAIMS = {
    "iss": GITHUB, "sub": "repo:acme/models:ref:refs/heads/main", "repository": "acme/models", "ref": "refs/heads/main",
    "workflow": "Nightly release",
}  # fmt: skip
_KEY = "signing key that only the provider knows"
_PARTS = {
    "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
    "subject_token_type": "urn:ietf:params:oauth:token-type:id_token",
}


@dataclass(frozen=True)
class PublisherEntry:
    """A trusted publisher in the settings of a repository, or of a user's CI/CD access."""

    resource: str
    claims: Mapping[str, str] = field(default_factory=lambda: {"iss": GITHUB, "repository": "acme/models"})
    read_only: bool = False


@dataclass(frozen=True)
class IssuedToken:
    """A Hub token for one resource."""

    resource: str
    may_write: bool
    expires_at: float


@dataclass
class OidcExchange:
    """The provider and the exchange. Tests set the claims of the job, the publishers, and the time."""

    publishers: list[PublisherEntry] = field(default_factory=list)
    claims: dict[str, Any] = field(default_factory=lambda: dict(CLAIMS))
    lifetime: int = 3600
    offset: float = 0.0
    tokens: dict[str, IssuedToken] = field(default_factory=dict)
    id_tokens: list[str] = field(default_factory=list)
    exchanges: list[str] = field(default_factory=list)  # the resource of each exchange that succeeded

    def now(self) -> float:
        return time.time() + self.offset

    def issue(self, audience: str, seconds: float = 300, **claims: object) -> str:
        """Return a signed id token of the job."""
        now = {"aud": audience, "exp": int(self.now() + seconds), "jti": f"number {len(self.id_tokens)}"}
        self.id_tokens.append(jwt.encode({**self.claims, **now, **claims}, _KEY, algorithm="HS256"))
        return self.id_tokens[-1]

    def exchange(self, request: Mapping[str, str], hub: str) -> tuple[int, dict[str, object]]:
        """Return the status and the body of ``POST /oauth/token``."""
        if any(request.get(name) != value for name, value in _PARTS.items()) or not request.get("resource"):
            return 400, {"error": "invalid_request", "error_description": "a parameter is missing or malformed"}
        refused = {"error": "invalid_grant", "error_description": "no trusted publisher accepts the token"}
        try:
            unchecked = {"verify_exp": False, "verify_iat": False}  # because this clock differs
            payload = jwt.decode(request["subject_token"], _KEY, algorithms=["HS256"], audience=hub, options=unchecked)
        except jwt.InvalidTokenError:
            return 400, refused
        publishers = [entry for entry in self.publishers if entry.resource == request["resource"]]
        accepted = [entry for entry in publishers if entry.claims.items() <= payload.items()]
        if payload["exp"] < self.now() or not accepted:
            return 400, refused
        entry = accepted[0]
        token = f"hf_jwt_{len(self.tokens)}_{hashlib.sha256(request['subject_token'].encode()).hexdigest()[:24]}"
        may_write = "/" in entry.resource and not entry.read_only
        self.tokens[token] = IssuedToken(entry.resource, may_write, self.now() + self.lifetime)
        self.exchanges.append(entry.resource)
        return 200, {"access_token": token, "token_type": "bearer", "expires_in": self.lifetime}

    def secrets(self) -> list[str]:
        """Return every id token and Hub token so far, the signatures of id tokens, and the job's request token."""
        signatures = [token.rpartition(".")[2] for token in self.id_tokens]
        return [REQUEST_TOKEN, *self.tokens, *self.id_tokens, *signatures]


def job_environment(hub: str) -> dict[str, str]:
    """Return the variables that GitHub Actions sets in a job that may request id tokens."""
    url = f"{hub}/_github/id-token?api-version=2.0"
    return {
        "GITHUB_ACTIONS": "true",
        "ACTIONS_ID_TOKEN_REQUEST_URL": url,
        "ACTIONS_ID_TOKEN_REQUEST_TOKEN": REQUEST_TOKEN,
    }
