"""Run a registry on loopback that follows the rules of the OCI distribution specification on which publishing relies.

The registry accepts a blob only under its true digest, and a manifest only if all of its blobs exist. Tags move without
a guard. It can require a token first, as public registries do.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from loopback import answering

USER, PASSWORD, TOKEN = "acme", "an-example-password", "an-example-token"


class SmallRegistry(ThreadingHTTPServer):
    """Minimal OCI registry. Tests may inspect and change its contents."""

    daemon_threads = True

    def __init__(self, *, login: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Registered)
        self.login = login
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.tags: dict[str, str] = {}
        self.uploads: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore broken connections, because tests kill clients."""


class _Registered(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # Nagle's algorithm would delay the second part of an answer by 40 ms
    server: SmallRegistry

    def route(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url, registry = urlsplit(self.path), self.server
        if url.path == "/token":
            wanted = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            fine = self.headers.get("Authorization") == wanted
            return self.answer(200 if fine else 401, json.dumps({"token": TOKEN}).encode() if fine else b"")
        if registry.login and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            host = self.headers["Host"]
            challenge = f'Bearer realm="http://{host}/token",service="small",scope="repository:acme/demo:pull,push"'
            return self.answer(401, _error("UNAUTHORIZED"), {"WWW-Authenticate": challenge})
        if upload := re.fullmatch(r"/v2/acme/demo/blobs/uploads/([0-9a-f-]*)", url.path):
            return self.upload(upload[1], parse_qs(url.query).get("digest", [""])[0], body)
        if blob := re.fullmatch(r"/v2/acme/demo/blobs/(sha256:[0-9a-f]{64})", url.path):
            found = registry.blobs.get(blob[1])
            return self.answer(404, _error("BLOB_UNKNOWN")) if found is None else self.answer(200, found)
        if manifest := re.fullmatch(r"/v2/acme/demo/manifests/([\w.:-]+)", url.path):
            return self.manifest(manifest[1], body)
        return self.answer(404, _error("NAME_UNKNOWN"))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = route  # noqa: N815  # names of the base class

    def upload(self, session: str, digest: str, body: bytes) -> None:
        if self.command == "POST":
            session = str(uuid.uuid4())
            self.server.uploads.add(session)
            return self.answer(202, b"", {"Location": f"/v2/acme/demo/blobs/uploads/{session}?state=x"})
        if session not in self.server.uploads:
            return self.answer(404, _error("BLOB_UPLOAD_UNKNOWN"))
        self.server.uploads.discard(session)
        if self.command == "DELETE":
            return self.answer(204, b"")
        if digest != f"sha256:{hashlib.sha256(body).hexdigest()}":
            return self.answer(400, _error("DIGEST_INVALID"))
        self.server.blobs[digest] = body
        return self.answer(201, b"", {"Location": f"/v2/acme/demo/blobs/{digest}"})

    def manifest(self, reference: str, body: bytes) -> None:
        registry = self.server
        if self.command != "PUT":
            found = registry.manifests.get(registry.tags.get(reference, reference))
            return self.answer(404, _error("MANIFEST_UNKNOWN")) if found is None else self.answer(200, found)
        said = json.loads(body)
        if any(one["digest"] not in registry.blobs for one in (said["config"], *said["layers"])):
            return self.answer(400, _error("MANIFEST_BLOB_UNKNOWN"))
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        registry.manifests[digest] = body
        if not reference.startswith("sha256:"):
            registry.tags[reference] = digest
        return self.answer(201, b"", {"Docker-Content-Digest": digest})

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _error(code: str) -> bytes:
    return json.dumps({"errors": [{"code": code, "message": code.lower().replace("_", " ")}]}).encode()


@contextmanager
def small_registry(*, login: bool = False) -> Iterator[SmallRegistry]:
    """Run the registry for the duration of a block."""
    with answering(SmallRegistry(login=login)) as registry:
        yield registry
