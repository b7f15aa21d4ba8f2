"""Run a stand-in for the Hugging Face Hub on loopback. The real huggingface_hub client talks to it in all Hub tests.

The stand-in supports tokens with permissions, private and gated repositories, commits, branches, tags, LFS (in one or
several parts, whole or in ranges), Xet (the real hf_xet writes into a directory) and paged listings. It counts the
bytes of each large file that it sends. At a chosen request it can fail, drop the answer or call a function. It logs
every request and the files on ``main`` after each one. ``oidc_look_alike`` models trusted publishers.

The stand-in was written from the client's expectations, so it proves our requests correct. It does not cover further
checks of the real Hub (scans, quotas, its card schema).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from look_alike_repository import LARGE, Commit, Denied, Objects, Repository, Stored, plain, pointer
from loopback import answering
from oidc_look_alike import REQUEST_TOKEN, IssuedToken, OidcExchange

WRITER, READER, STRANGER = "hf_writer_of_acme", "hf_reader_of_acme", "hf_somebody_else"
NARROW, NARROW_READER = "hf_writer_of_acme_alone", "hf_fine_grained_reader"
_ROLES = {  # namespace, may write
    WRITER: ("acme", True),
    READER: ("acme", False),
    STRANGER: ("other", True),
    NARROW: ("acme", True),
    NARROW_READER: ("acme", False),
}
_CARD = re.compile(r"---\n(.*?)\n---", re.DOTALL)


@dataclass(frozen=True)
class Fault:
    """Fault that the stand-in injects into a request.

    Attributes:
        kind: One of these faults. ``fail``: answer with ``status`` and do nothing. ``drop``: do the work, then close
            the connection without an answer. ``call``: do the work, then call ``call`` instead of answering.
        nth: Index of the first affected request among the matching ones, from 0.
        times: Number of consecutive matching requests affected.
    """

    kind: str
    nth: int = 0
    times: int = 1
    method: str = ""
    path: str = ""
    status: int = 503
    body: str = "injected fault"
    call: Callable[[], None] | None = None


@dataclass(frozen=True)
class Request:
    """A request in the form that the routes receive."""

    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    body: bytes
    url: str  # base URL of the stand-in, as the client addressed it


@dataclass(frozen=True)
class Answer:
    """An HTTP response."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Logged:
    """Log entry for one request, answered or not."""

    method: str
    path: str
    status: int
    authorised: bool
    host: str


class LookAlike(ThreadingHTTPServer):
    """Stand-in for the Hub. Tests may inspect and change ``repositories``.

    Args:
        root: Directory for large files.
        xet: Whether large files are transferred by Xet instead of LFS.
        part_size: Size in bytes above which LFS files are uploaded in parts of this size. 0 means never.
        page: Number of entries on a page of a listing.
    """

    daemon_threads = True

    def __init__(self, root: Path, *, xet: bool = False, part_size: int = 0, page: int = 1000) -> None:
        super().__init__(("127.0.0.1", 0), _Conversation)
        self.objects = Objects(root, xet)
        self.part_size, self.page = part_size, page
        self.repositories: dict[str, Repository] = {}
        self.oidc = OidcExchange()
        self.log: list[Logged] = []
        self.sent: Counter[str] = Counter()  # bytes of large files, by sha256
        self.listings: list[dict[str, str]] = []  # files on main after every request: name -> blob
        self.faults: list[Fault] = []
        self.after: list[Callable[[Request], None]] = []
        self._matched: dict[int, int] = {}
        self.lock = threading.RLock()

    @property
    def url(self) -> str:
        """Value for ``HF_ENDPOINT``."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def repository(self) -> Repository:
        """The only repository."""
        (only,) = self.repositories.values()
        return only

    def set_faults(self, faults: Sequence[Fault]) -> None:
        """Replace the faults and restart their counts."""
        with self.lock:
            self.faults = list(faults)
            self._matched.clear()

    def handle_error(self, *_: object) -> None:
        """Ignore broken connections, because tests kill clients."""

    def fault_for(self, request: Request) -> Fault | None:
        """Return the fault to inject into this request, if any, and count the request."""
        with self.lock:
            for number, fault in enumerate(self.faults):
                if fault.method in ("", request.method) and re.search(fault.path, request.path):
                    count = self._matched.get(number, 0)
                    self._matched[number] = count + 1
                    if fault.nth <= count < fault.nth + fault.times:
                        return fault
        return None

    def answer(self, request: Request) -> Answer:
        """Return the answer of the route that matches the request."""
        method = "GET" if request.method == "HEAD" else request.method
        path = re.sub(r"^(/api)?/datasets/", lambda at: "/api/models/" if at[1] else "/", request.path)
        for wanted, pattern, name in _ROUTES:
            if wanted == method and (found := pattern.fullmatch(path)):
                parts = {key: unquote(value) for key, value in found.groupdict().items() if value is not None}
                try:
                    with self.lock:
                        answer: Answer = getattr(self, f"on_{name}")(request, **parts)
                        return answer
                except Denied as no:
                    facts = {"X-Error-Message": no.message} | ({"X-Error-Code": no.code} if no.code else {})
                    return _json({"error": no.message, **no.body}, no.status, facts)
        return _json({"error": f"no route {request.method} {request.path}"}, 404)

    # Permissions

    def namespace(self, request: Request) -> tuple[str, bool]:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        issued = self.oidc.tokens.get(token)
        if (token and token not in _ROLES and not issued) or (issued and issued.expires_at < self.oidc.now()):
            raise Denied(401, "Invalid credentials in Authorization header")
        return _ROLES.get(token, ("", False))

    def publisher(self, request: Request, repo: str) -> IssuedToken | None:
        """Return the token of a trusted publisher in a request, which must be for this repository."""
        issued = self.oidc.tokens.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if issued and "/" in issued.resource and issued.resource != repo:
            raise Denied(403, f"the token is for {issued.resource} only")
        return issued

    def find(self, request: Request, repo: str, *, write: bool = False, content: bool = False) -> Repository:
        namespace, may_write = self.namespace(request)
        ours = repo.partition("/")[0] == namespace
        found = self.repositories.get(repo)
        if issued := self.publisher(request, repo):
            ours, may_write = issued.resource == repo, issued.may_write
        if found is None or (found.private and not ours):
            raise Denied(404 if namespace else 401, "Repository not found", "RepoNotFound")
        if write and not (ours and may_write):
            raise Denied(403, "you must use a write token")
        if content and found.gated and not (ours or (issued and "/" not in issued.resource)):
            raise Denied(403, f"Access to model {repo} is restricted", "GatedRepo")
        return found

    def add_model(
        self, repo: str, directory: Path, *, private: bool = False, gated: str | bool = False, branch: str = "main"
    ) -> Commit:
        """Replace all files at ``branch`` with those in ``directory``. Create the repository if it is missing."""
        found = self.repositories.setdefault(repo, Repository(repo, private=private, gated=gated))
        tree = {}
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            name = path.relative_to(directory).as_posix()
            tree[name] = self.objects.keep(path) if LARGE.fullmatch(name) else plain(path.read_bytes())
        return found.add(branch, found.branches.get(branch), "by hand", tree)

    # Accounts and trusted publishers

    def on_id_token(self, request: Request) -> Answer:
        if request.headers.get("Authorization") != f"Bearer {REQUEST_TOKEN}" or "api-version" not in request.query:
            raise Denied(403, "Forbidden")
        return _json({"value": self.oidc.issue(request.query["audience"][0])})

    def on_exchange(self, request: Request) -> Answer:
        status, body = self.oidc.exchange(json.loads(request.body), request.url)
        return _json(body, status)

    def on_whoami(self, request: Request) -> Answer:
        namespace, _ = self.namespace(request)
        if not namespace:
            raise Denied(401, "Invalid username or password.")
        token = request.headers["Authorization"].removeprefix("Bearer ")
        access: dict[str, object] = {"displayName": "test", "role": "read" if token == READER else "write"}
        if token in (NARROW, NARROW_READER):
            permissions = ["repo.content.read", *(["repo.write"] if token == NARROW else [])]
            scope = {"entity": {"_id": "1", "type": "org", "name": namespace}, "permissions": permissions}
            fine = {"canReadGatedRepos": False, "global": [], "scoped": [scope]}
            access |= {"role": "fineGrained", "fineGrained": fine}
        organizations = [{"type": "org", "name": namespace, "roleInOrg": "write"}]
        return _json({"type": "user", "name": "ann", "orgs": organizations, "auth": {"accessToken": access}})

    def on_auth_check(self, request: Request, repo: str, write: str = "") -> Answer:
        self.find(request, repo, write=bool(write), content=True)
        return Answer()

    # Repositories and references

    def on_create(self, request: Request) -> Answer:
        wanted = json.loads(request.body)
        repo = f"{wanted['organization']}/{wanted['name']}"
        namespace, may_write = self.namespace(request)
        if not (may_write and namespace == wanted["organization"]):
            raise Denied(403, "You don't have the rights to create a model under this namespace")
        if repo in self.repositories:
            raise Denied(409, "You already created this model repo", url=f"{request.url}/{repo}")
        self.repositories[repo] = Repository(repo, private=wanted.get("visibility") == "private")
        return _json({"url": f"{request.url}/{repo}"})

    def on_settings(self, request: Request, repo: str) -> Answer:
        found, wanted = self.find(request, repo, write=True), json.loads(request.body)
        if self.publisher(request, repo):
            raise Denied(403, "a trusted publisher cannot change settings")
        found.gated = wanted.get("gated", found.gated)
        found.private = wanted.get("visibility", "private" if found.private else "public") == "private"
        return _json(wanted)

    def on_info(self, request: Request, repo: str, revision: str = "main") -> Answer:
        found = self.find(request, repo)
        facts = {"id": repo, "sha": found.at(revision).id, "private": found.private, "gated": found.gated}
        return _json({**facts, "tags": [], "siblings": [{"rfilename": name} for name in found.at(revision).tree]})

    def on_refs(self, request: Request, repo: str) -> Answer:
        found = self.find(request, repo)
        branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in found.branches.items()]
        tags = [{"name": n, "ref": f"refs/tags/{n}", "targetCommit": c} for n, c in found.tags.items()]
        return _json({"branches": branches, "tags": tags, "converts": []})

    def on_create_branch(self, request: Request, repo: str, revision: str) -> Answer:
        found = self.find(request, repo, write=True)
        if revision in found.branches:
            raise Denied(409, "Reference already exists")
        found.branches[revision] = found.at(json.loads(request.body).get("startingPoint", "main")).id
        return _json({})

    def on_delete_branch(self, request: Request, repo: str, revision: str) -> Answer:
        if self.find(request, repo, write=True).branches.pop(revision, None) is None:
            raise Denied(404, "Reference does not exist", "RevisionNotFound")
        return Answer()

    def on_create_tag(self, request: Request, repo: str, revision: str) -> Answer:
        found, name = self.find(request, repo, write=True), json.loads(request.body)["tag"]
        if name in found.tags:
            raise Denied(409, f"Tag reference exists already: refs/tags/{name}")
        found.tags[name] = found.at(revision).id
        return _json({})

    def on_delete_tag(self, request: Request, repo: str, revision: str) -> Answer:
        if self.find(request, repo, write=True).tags.pop(revision, None) is None:
            raise Denied(404, "Tag does not exist", "RevisionNotFound")
        return Answer()

    # Listings

    def on_commits(self, request: Request, repo: str, revision: str) -> Answer:
        found = self.find(request, repo)
        chain = [found.at(revision)]
        while chain[-1].parent is not None:
            chain.append(found.commits[chain[-1].parent])
        said = {"authors": [], "date": "2026-01-01T00:00:00.000Z", "message": ""}
        return _json([{"id": commit.id, "title": commit.title, **said} for commit in chain])

    def on_tree(self, request: Request, repo: str, revision: str) -> Answer:
        tree = self.find(request, repo).at(revision).tree
        folders = {str(parent) for name in tree for parent in Path(name).parents} - {"."}
        entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": folder} for folder in sorted(folders)]
        entries += [_entry(name, file) for name, file in sorted(tree.items())]
        start = int(request.query.get("cursor", ["0"])[0])
        stop, link = start + self.page, {}
        if stop < len(entries):
            link = {"Link": f'<{request.url}{request.path}?recursive=true&cursor={stop}>; rel="next"'}
        return _json(entries[start:stop], headers=link)

    def on_paths(self, request: Request, repo: str, revision: str) -> Answer:
        tree = self.find(request, repo).at(revision).tree
        wanted = parse_qs(request.body.decode()).get("paths", [])
        return _json([_entry(name, tree[name]) for name in wanted if name in tree])

    # Writing

    def on_validate(self, request: Request) -> Answer:
        found = _CARD.match(json.loads(request.body)["content"])
        card = yaml.safe_load(found[1]) if found else {}
        errors = []
        if card.get("base_model_relation") not in (None, "finetune", "adapter", "merge", "quantized"):
            errors.append({"message": '"base_model_relation" must be one of [adapter, merge, quantized, finetune]'})
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", str(card.get("license", "other"))):
            errors.append({"message": '"license" must be one of a list of values'})
        return _json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def on_preupload(self, request: Request, repo: str, revision: str) -> Answer:
        tree = self.find(request, repo, write=True).at(revision).tree
        files = []
        for file in json.loads(request.body)["files"]:
            binary = b"\0" in base64.b64decode(file["sample"])
            there = tree.get(file["path"])
            mode = "lfs" if binary or LARGE.fullmatch(file["path"]) or file["size"] > 10 << 20 else "regular"
            oid = {"oid": there.sha256 or there.blob} if there else {}
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, **oid})
        return _json({"files": files})

    def on_commit(self, request: Request, repo: str, revision: str) -> Answer:
        found = self.find(request, repo, write=True)
        lines = [json.loads(line) for line in request.body.splitlines() if line.strip()]
        title = next(line["value"]["summary"] for line in lines if line["key"] == "header")
        commit = found.write(revision, title, lines, self.objects)
        return _json({"commitOid": commit.id, "commitUrl": f"{request.url}/{repo}/commit/{commit.id}"})

    # Large files

    def on_batch(self, request: Request, repo: str) -> Answer:
        self.find(request, repo, write=True)
        storage, objects, parted = self.storage(request), [], False
        for wanted in json.loads(request.body)["objects"]:
            sha256, size = wanted["oid"], wanted["size"]
            actions: dict[str, object] = {}
            if not self.objects.place(sha256).exists():
                upload = {"href": f"{storage}/_storage/{sha256}", "header": {}}
                if self.part_size and size > self.part_size:
                    parted = True
                    count = -(-size // self.part_size)
                    parts = {f"{n:05d}": f"{storage}/_storage/{sha256}/part/{n}" for n in range(1, count + 1)}
                    upload = {
                        "href": f"{storage}/_storage/{sha256}/complete",
                        "header": {"chunk_size": str(self.part_size), **parts},
                    }
                actions = {"actions": {"upload": upload, "verify": {"href": f"{request.url}/_verify"}}}
            objects.append({"oid": sha256, "size": size, **actions})
        return _json({"transfer": "multipart" if parted else "basic", "objects": objects})

    def on_put(self, request: Request, sha256: str) -> Answer:
        if hashlib.sha256(request.body).hexdigest() != sha256:
            raise Denied(400, "sha256 does not match")
        self.objects.place(sha256).write_bytes(request.body)
        return Answer(headers={"ETag": '"put"'})

    def on_part(self, request: Request, sha256: str, number: str) -> Answer:
        self.objects.place(f"{sha256}.{number}").write_bytes(request.body)
        return Answer(headers={"ETag": f'"{number}"'})

    def on_complete(self, request: Request, sha256: str) -> Answer:
        numbers = [part["partNumber"] for part in json.loads(request.body)["parts"]]
        whole = b"".join(self.objects.place(f"{sha256}.{number}").read_bytes() for number in sorted(numbers))
        if hashlib.sha256(whole).hexdigest() != sha256:
            raise Denied(400, "sha256 does not match")
        self.objects.place(sha256).write_bytes(whole)
        return _json({})

    def on_verify(self, request: Request) -> Answer:
        wanted = json.loads(request.body)
        place = self.objects.place(wanted["oid"])
        if not place.exists() or place.stat().st_size != wanted["size"]:
            raise Denied(404, "no such object")
        return _json({})

    def on_xet(self, request: Request, repo: str, kind: str, revision: str) -> Answer:
        self.find(request, repo, write=kind == "write").at(revision)
        if not self.objects.xet:
            raise Denied(404, "Xet is not enabled here")
        facts = {"accessToken": "xet", "exp": int(time.time()) + 3600, "casUrl": f"local://{self.objects.cas}"}
        names = {"accessToken": "X-Xet-Access-Token", "exp": "X-Xet-Token-Expiration", "casUrl": "X-Xet-Cas-Url"}
        return _json(facts, headers={names[key]: str(value) for key, value in facts.items()})

    # Reading

    def storage(self, request: Request) -> str:
        """Return a storage origin that differs from the Hub's, as on the real Hub.

        With a different origin, the client takes the file's metadata from the redirect.
        """
        return request.url.replace("//127.0.0.1", "//localhost")

    def on_resolve(self, request: Request, repo: str, revision: str, path: str) -> Answer:
        commit = self.find(request, repo, content=True).at(revision)
        file = commit.tree.get(path)
        facts = {"X-Repo-Commit": commit.id}
        if file is None:
            return Answer(404, headers={**facts, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
        if file.sha256 is None:
            return Answer(body=file.data, headers={**facts, "ETag": f'"{file.blob}"'})
        facts |= {"X-Linked-Size": str(file.size), "X-Linked-ETag": f'"{file.sha256}"'}
        if file.xet:
            token = f"{request.url}/api/models/{repo}/xet-read-token/{commit.id}"
            facts |= {"X-Xet-Hash": file.xet, "X-Xet-Refresh-Route": token, "Link": f'<{token}>; rel="xet-auth"'}
        return Answer(302, headers={**facts, "Location": f"{self.storage(request)}/_storage/{file.sha256}"})

    def on_get(self, request: Request, sha256: str) -> Answer:
        size = self.objects.place(sha256).stat().st_size
        start, stop, status, facts = 0, size, 200, {"ETag": f'"{sha256}"'}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")):
            start, stop, status = int(wanted[1]), min(int(wanted[2] or size) + 1, size), 206
            facts["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        with self.objects.place(sha256).open("rb") as file:
            file.seek(start)
            body = file.read(stop - start)
        self.sent[sha256] += len(body) if request.method == "GET" else 0
        return Answer(status, body, facts)


_REPO = r"/api/models/(?P<repo>[^/]+/[^/]+)"
_ROUTES = [
    (method, re.compile(pattern), name)
    for method, pattern, name in (
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/oauth/token", "exchange"),
        ("GET", r"/_github/id-token", "id_token"),
        ("GET", _REPO + r"/auth-check(/(?P<write>write))?", "auth_check"),
        ("PUT", _REPO + r"/settings", "settings"),
        ("GET", _REPO, "info"),
        ("GET", _REPO + r"/revision/(?P<revision>[^/]+)", "info"),
        ("GET", _REPO + r"/refs", "refs"),
        ("GET", _REPO + r"/tree/(?P<revision>[^/]+)", "tree"),
        ("POST", _REPO + r"/paths-info/(?P<revision>[^/]+)", "paths"),
        ("POST", _REPO + r"/branch/(?P<revision>[^/]+)", "create_branch"),
        ("DELETE", _REPO + r"/branch/(?P<revision>[^/]+)", "delete_branch"),
        ("POST", _REPO + r"/tag/(?P<revision>[^/]+)", "create_tag"),
        ("DELETE", _REPO + r"/tag/(?P<revision>[^/]+)", "delete_tag"),
        ("GET", _REPO + r"/commits/(?P<revision>[^/]+)", "commits"),
        ("POST", _REPO + r"/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", _REPO + r"/commit/(?P<revision>[^/]+)", "commit"),
        ("GET", _REPO + r"/xet-(?P<kind>read|write)-token/(?P<revision>[^/]+)", "xet"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("POST", r"/_verify", "verify"),
        ("PUT", r"/_storage/(?P<sha256>[0-9a-f]{64})", "put"),
        ("GET", r"/_storage/(?P<sha256>[0-9a-f]{64})", "get"),
        ("PUT", r"/_storage/(?P<sha256>[0-9a-f]{64})/part/(?P<number>\d+)", "part"),
        ("POST", r"/_storage/(?P<sha256>[0-9a-f]{64})/complete", "complete"),
        ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    )
]


def _entry(name: str, file: Stored) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": file.size, "oid": file.blob}
    if file.sha256:
        size = len(pointer(file.sha256, file.size))
        entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": size}
    return entry | ({"xetHash": file.xet} if file.xet else {})


def _json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})


class _Conversation(BaseHTTPRequestHandler):
    """Handler of one HTTP/1.1 connection that injects faults and passes requests to ``LookAlike.answer``."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise every answer waits 40 ms for the client's acknowledgment
    wbufsize = -1
    server: LookAlike

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _converse(self) -> None:
        split = urlsplit(self.path)
        host = self.headers.get("Host", "")
        request = Request(self.command, split.path, parse_qs(split.query), self.headers, self._body(), f"http://{host}")
        fault = self.server.fault_for(request)
        if fault and fault.kind == "fail":
            answer = Answer(fault.status, fault.body.encode())
        else:
            answer = self.server.answer(request)
        with self.server.lock:
            known = "Authorization" in self.headers
            self.server.log.append(Logged(self.command, self.path, answer.status, known, host))
            for repository in self.server.repositories.values():
                tree = repository.at("main").tree
                self.server.listings.append({name: file.blob for name, file in tree.items()})
        for look in self.server.after:
            look(request)
        if fault and fault.kind != "fail":
            if fault.call:
                fault.call()
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _converse  # noqa: N815  # names that http.server requires

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body


@contextmanager
def hub(root: Path, *, xet: bool = False, part_size: int = 0, page: int = 1000) -> Iterator[LookAlike]:
    """Run a stand-in for the duration of a block."""
    with answering(LookAlike(root, xet=xet, part_size=part_size, page=page)) as server:
        yield server
