"""Run a registry on loopback that follows the OCI distribution specification, as far as publishing relies on it."""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from loopback import Answer, FakeServer, Request, answering, json_answer

USER, PASSWORD, TOKEN = "acme", "an-example-password", "an-example-token"
_DEMO = "/v2/acme/demo"


class SmallRegistry(FakeServer):
    """Minimal OCI registry. Tests may inspect and change its contents."""

    def __init__(self, *, login: bool = False) -> None:
        routes = {
            "GET /token": self.issue_token,
            f"POST {_DEMO}/blobs/uploads/": self.begin_upload,
            f"(PUT|DELETE) {_DEMO}/blobs/uploads/(?P<session>[0-9a-f-]+)": self.end_upload,
            f"GET {_DEMO}/blobs/(?P<digest>sha256:[0-9a-f]{{64}})": lambda request, digest: _found(
                self.blobs.get(digest), "BLOB_UNKNOWN"
            ),
            f"GET {_DEMO}/manifests/(?P<reference>[\\w.:-]+)": lambda request, reference: _found(
                self.manifests.get(self.tags.get(reference, reference)), "MANIFEST_UNKNOWN"
            ),
            f"PUT {_DEMO}/manifests/(?P<reference>[\\w.:-]+)": self.put_manifest,
            ".*": lambda request: _error(404, "NAME_UNKNOWN"),
        }
        super().__init__(routes)
        self.login = login
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.tags: dict[str, str] = {}
        self.uploads: set[str] = set()

    def answer(self, request: Request) -> Answer:
        if self.login and request.token != TOKEN and request.route != "/token":
            challenge = f'Bearer realm="{request.url}/token",service="small",scope="repository:acme/demo:pull,push"'
            return _error(401, "UNAUTHORIZED", {"WWW-Authenticate": challenge})
        return super().answer(request)

    def issue_token(self, request: Request) -> object:
        expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        return {"token": TOKEN} if request.headers.get("Authorization") == expected else Answer(401)

    def begin_upload(self, request: Request) -> Answer:
        session = str(uuid.uuid4())
        self.uploads.add(session)
        return Answer(202, headers={"Location": f"{_DEMO}/blobs/uploads/{session}?state=x"})

    def end_upload(self, request: Request, session: str) -> Answer:
        if session not in self.uploads:
            return _error(404, "BLOB_UPLOAD_UNKNOWN")
        self.uploads.discard(session)
        if request.method == "DELETE":
            return Answer(204)
        digest = request.query.get("digest", "")
        if digest != _digest(request.body):
            return _error(400, "DIGEST_INVALID")
        self.blobs[digest] = request.body
        return Answer(201, headers={"Location": f"{_DEMO}/blobs/{digest}"})

    def put_manifest(self, request: Request, reference: str) -> Answer:
        manifest, digest = request.json, _digest(request.body)
        if any(blob["digest"] not in self.blobs for blob in (manifest["config"], *manifest["layers"])):
            return _error(400, "MANIFEST_BLOB_UNKNOWN")
        self.manifests[digest] = request.body
        if not reference.startswith("sha256:"):
            self.tags[reference] = digest
        return Answer(201, headers={"Docker-Content-Digest": digest})


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _found(content: bytes | None, code: str) -> Answer:
    return _error(404, code) if content is None else Answer(body=content)


def _error(status: int, code: str, headers: Mapping[str, str] | None = None) -> Answer:
    return json_answer({"errors": [{"code": code, "message": code.lower().replace("_", " ")}]}, status, headers)


@contextmanager
def small_registry(*, login: bool = False) -> Iterator[SmallRegistry]:
    """Run the registry for the duration of a block."""
    with answering(SmallRegistry(login=login)) as registry:
        yield registry
