"""Run a stand-in for the Hugging Face Hub on loopback. The real huggingface_hub client talks to it in all Hub tests."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs

import pytest
import yaml
from look_alike_repository import LARGE, Commit, Denied, Objects, Repository, Stored, plain, pointer
from loopback import Answer, FakeServer, Fault, Request, answering, json_answer
from oidc_look_alike import REQUEST_TOKEN, IssuedToken, OidcExchange

__all__ = ["NARROW", "NARROW_READER", "READER", "STRANGER", "WRITER", "Fault", "LookAlike", "hub", "use_hub"]

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


class LookAlike(FakeServer):
    """Stand-in for the Hub. Tests may inspect and change ``repositories``.

    Args:
        root: Directory for large files.
        xet: Whether large files are transferred by Xet instead of LFS.
        part_size: Size in bytes above which LFS files are uploaded in parts of this size. 0 means never.
        page: Number of entries on a page of a listing.
    """

    def __init__(self, root: Path, *, xet: bool = False, part_size: int = 0, page: int = 1000) -> None:
        super().__init__({pattern: getattr(self, f"on_{name}") for pattern, name in _ROUTES.items()})
        self.objects = Objects(root, xet)
        self.part_size, self.page = part_size, page
        self.repositories: dict[str, Repository] = {}
        self.oidc = OidcExchange()
        self.sent: Counter[str] = Counter()  # bytes of large files, by sha256
        self.listings: list[dict[str, str]] = []  # files on main after every request: name -> blob
        self.after: list[Callable[[Request], None]] = []  # called with every request, after the work is done

    @property
    def repository(self) -> Repository:
        """The only repository."""
        (only,) = self.repositories.values()
        return only

    def answer(self, request: Request) -> Answer:
        try:
            with self.lock:
                return super().answer(request)
        except Denied as no:
            facts = {"X-Error-Message": no.message} | ({"X-Error-Code": no.code} if no.code else {})
            return json_answer({"error": no.message, **no.body}, no.status, facts)

    def after_answer(self, request: Request) -> None:
        with self.lock:
            trees = [repository.at("main").tree for repository in self.repositories.values()]
            self.listings += [{name: file.blob for name, file in tree.items()} for tree in trees]
        for look in self.after:
            look(request)

    # Permissions

    def namespace(self, request: Request) -> tuple[str, bool]:
        issued = self.oidc.tokens.get(request.token)
        is_unknown = request.token and request.token not in _ROLES and not issued
        if is_unknown or (issued and issued.expires_at < self.oidc.now()):
            raise Denied(401, "Invalid credentials in Authorization header")
        return _ROLES.get(request.token, ("", False))

    def publisher(self, request: Request, repo: str) -> IssuedToken | None:
        """Return the token of a trusted publisher in a request, which must be for this repository."""
        issued = self.oidc.tokens.get(request.token)
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

    def on_id_token(self, request: Request) -> object:
        if request.token != REQUEST_TOKEN or "api-version" not in request.query:
            raise Denied(403, "Forbidden")
        return {"value": self.oidc.issue(request.query["audience"])}

    def on_exchange(self, request: Request) -> object:
        status, body = self.oidc.exchange(request.json, request.url)
        return json_answer(body, status)

    def on_whoami(self, request: Request) -> object:
        namespace, _ = self.namespace(request)
        if not namespace:
            raise Denied(401, "Invalid username or password.")
        access: dict[str, object] = {"displayName": "test", "role": "read" if request.token == READER else "write"}
        if request.token in (NARROW, NARROW_READER):
            permissions = ["repo.content.read", *(["repo.write"] if request.token == NARROW else [])]
            scope = {"entity": {"_id": "1", "type": "org", "name": namespace}, "permissions": permissions}
            fine = {"canReadGatedRepos": False, "global": [], "scoped": [scope]}
            access |= {"role": "fineGrained", "fineGrained": fine}
        organizations = [{"type": "org", "name": namespace, "roleInOrg": "write"}]
        return {"type": "user", "name": "ann", "orgs": organizations, "auth": {"accessToken": access}}

    def on_auth_check(self, request: Request, repo: str, write: str = "") -> object:
        self.find(request, repo, write=bool(write), content=True)
        return Answer()

    # Repositories and references

    def on_create(self, request: Request) -> object:
        wanted = request.json
        repo = f"{wanted['organization']}/{wanted['name']}"
        namespace, may_write = self.namespace(request)
        if not (may_write and namespace == wanted["organization"]):
            raise Denied(403, "You don't have the rights to create a model under this namespace")
        if repo in self.repositories:
            raise Denied(409, "You already created this model repo", url=f"{request.url}/{repo}")
        self.repositories[repo] = Repository(repo, private=wanted.get("visibility") == "private")
        return {"url": f"{request.url}/{repo}"}

    def on_settings(self, request: Request, repo: str) -> object:
        found, wanted = self.find(request, repo, write=True), request.json
        if self.publisher(request, repo):
            raise Denied(403, "a trusted publisher cannot change settings")
        found.gated = wanted.get("gated", found.gated)
        found.private = wanted.get("visibility", "private" if found.private else "public") == "private"
        return wanted

    def on_info(self, request: Request, repo: str, revision: str = "main") -> object:
        found = self.find(request, repo)
        facts = {"id": repo, "sha": found.at(revision).id, "private": found.private, "gated": found.gated}
        facts |= {"cardData": found.card_data} if found.card_data else {}
        return {**facts, "tags": [], "siblings": [{"rfilename": name} for name in found.at(revision).tree]}

    def on_refs(self, request: Request, repo: str) -> object:
        found = self.find(request, repo)
        branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in found.branches.items()]
        tags = [{"name": n, "ref": f"refs/tags/{n}", "targetCommit": c} for n, c in found.tags.items()]
        return {"branches": branches, "tags": tags, "converts": []}

    def on_create_branch(self, request: Request, repo: str, revision: str) -> object:
        found = self.find(request, repo, write=True)
        if revision in found.branches:
            raise Denied(409, "Reference already exists")
        found.branches[revision] = found.at(request.json.get("startingPoint", "main")).id
        return {}

    def on_create_tag(self, request: Request, repo: str, revision: str) -> object:
        found, name = self.find(request, repo, write=True), request.json["tag"]
        if name in found.tags:
            raise Denied(409, f"Tag reference exists already: refs/tags/{name}")
        found.tags[name] = found.at(revision).id
        return {}

    def on_delete(self, request: Request, repo: str, kind: str, revision: str) -> object:
        found = self.find(request, repo, write=True)
        if (found.tags if kind == "tag" else found.branches).pop(revision, None) is None:
            raise Denied(404, "Reference does not exist", "RevisionNotFound")
        return Answer()

    # Listings

    def on_commits(self, request: Request, repo: str, revision: str) -> object:
        chain = self.find(request, repo).history(revision)
        said = {"authors": [], "date": "2026-01-01T00:00:00.000Z", "message": ""}
        return [{"id": commit.id, "title": commit.title, **said} for commit in chain]

    def on_tree(self, request: Request, repo: str, revision: str) -> object:
        tree = self.find(request, repo).at(revision).tree
        folders = {str(parent) for name in tree for parent in Path(name).parents} - {"."}
        entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": folder} for folder in sorted(folders)]
        entries += [_entry(name, file) for name, file in sorted(tree.items())]
        start = int(request.query.get("cursor", 0))
        stop, link = start + self.page, {}
        if stop < len(entries):
            link = {"Link": f'<{request.url}{request.route}?recursive=true&cursor={stop}>; rel="next"'}
        return json_answer(entries[start:stop], headers=link)

    def on_paths(self, request: Request, repo: str, revision: str) -> object:
        tree = self.find(request, repo).at(revision).tree
        wanted = parse_qs(request.body.decode()).get("paths", [])
        return [_entry(name, tree[name]) for name in wanted if name in tree]

    # Writing

    def on_validate(self, request: Request) -> object:
        found = _CARD.match(request.json["content"])
        card = yaml.safe_load(found[1]) if found else {}
        errors = []
        if card.get("base_model_relation") not in (None, "finetune", "adapter", "merge", "quantized"):
            errors.append({"message": '"base_model_relation" must be one of [adapter, merge, quantized, finetune]'})
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", str(card.get("license", "other"))):
            errors.append({"message": '"license" must be one of a list of values'})
        return json_answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def on_preupload(self, request: Request, repo: str, revision: str) -> object:
        tree = self.find(request, repo, write=True).at(revision).tree
        files = []
        for file in request.json["files"]:
            binary = b"\0" in base64.b64decode(file["sample"])
            there = tree.get(file["path"])
            mode = "lfs" if binary or LARGE.fullmatch(file["path"]) or file["size"] > 10 << 20 else "regular"
            oid = {"oid": there.sha256 or there.blob} if there else {}
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, **oid})
        return {"files": files}

    def on_commit(self, request: Request, repo: str, revision: str) -> object:
        found = self.find(request, repo, write=True)
        lines = [json.loads(line) for line in request.body.splitlines() if line.strip()]
        title = next(line["value"]["summary"] for line in lines if line["key"] == "header")
        commit = found.write(revision, title, lines, self.objects)
        return {"commitOid": commit.id, "commitUrl": f"{request.url}/{repo}/commit/{commit.id}"}

    # Large files

    def on_batch(self, request: Request, repo: str) -> object:
        self.find(request, repo, write=True)
        storage, objects, parted = self.storage(request), [], False
        for wanted in request.json["objects"]:
            sha256, size = wanted["oid"], wanted["size"]
            actions: dict[str, object] = {}
            if not self.objects.place(sha256).exists():
                place = f"{storage}/_storage/{sha256}"
                upload: dict[str, object] = {"href": place, "header": {}}
                if self.part_size and size > self.part_size:
                    parted, count = True, -(-size // self.part_size)
                    parts = {f"{number:05d}": f"{place}/part/{number}" for number in range(1, count + 1)}
                    upload = {"href": f"{place}/complete", "header": {"chunk_size": str(self.part_size), **parts}}
                actions = {"actions": {"upload": upload, "verify": {"href": f"{request.url}/_verify"}}}
            objects.append({"oid": sha256, "size": size, **actions})
        return {"transfer": "multipart" if parted else "basic", "objects": objects}

    def on_put(self, request: Request, sha256: str) -> object:
        if hashlib.sha256(request.body).hexdigest() != sha256:
            raise Denied(400, "sha256 does not match")
        self.objects.place(sha256).write_bytes(request.body)
        return Answer(headers={"ETag": '"put"'})

    def on_part(self, request: Request, sha256: str, number: str) -> object:
        self.objects.place(f"{sha256}.{number}").write_bytes(request.body)
        return Answer(headers={"ETag": f'"{number}"'})

    def on_complete(self, request: Request, sha256: str) -> object:
        numbers = [part["partNumber"] for part in request.json["parts"]]
        whole = b"".join(self.objects.place(f"{sha256}.{number}").read_bytes() for number in sorted(numbers))
        if hashlib.sha256(whole).hexdigest() != sha256:
            raise Denied(400, "sha256 does not match")
        self.objects.place(sha256).write_bytes(whole)
        return {}

    def on_verify(self, request: Request) -> object:
        wanted = request.json
        place = self.objects.place(wanted["oid"])
        if not place.exists() or place.stat().st_size != wanted["size"]:
            raise Denied(404, "no such object")
        return {}

    def on_xet(self, request: Request, repo: str, kind: str, revision: str) -> object:
        self.find(request, repo, write=kind == "write").at(revision)
        if not self.objects.xet:
            raise Denied(404, "Xet is not enabled here")
        facts = {"accessToken": "xet", "exp": int(time.time()) + 3600, "casUrl": f"local://{self.objects.cas}"}
        names = {"accessToken": "X-Xet-Access-Token", "exp": "X-Xet-Token-Expiration", "casUrl": "X-Xet-Cas-Url"}
        return json_answer(facts, headers={names[key]: str(value) for key, value in facts.items()})

    # Reading

    def storage(self, request: Request) -> str:
        """Return a storage origin that differs from the Hub's, as on the real Hub."""
        return request.url.replace("//127.0.0.1", "//localhost")

    def on_resolve(self, request: Request, repo: str, revision: str, path: str) -> object:
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

    def on_get(self, request: Request, sha256: str) -> object:
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


_REPO = "/api/(models|datasets)/(?P<repo>[^/]+/[^/]+)"
_AT = "(?P<revision>[^/]+)"
_STORAGE = "/_storage/(?P<sha256>[0-9a-f]{64})"
_ROUTES = {
    "POST /api/repos/create": "create", "POST /api/validate-yaml": "validate", "GET /api/whoami-v2": "whoami",
    "POST /oauth/token": "exchange", "GET /_github/id-token": "id_token",
    f"GET {_REPO}/auth-check(/(?P<write>write))?": "auth_check", f"PUT {_REPO}/settings": "settings",
    f"GET {_REPO}(/revision/{_AT})?": "info", f"GET {_REPO}/refs": "refs", f"GET {_REPO}/tree/{_AT}": "tree",
    f"POST {_REPO}/paths-info/{_AT}": "paths", f"POST {_REPO}/branch/{_AT}": "create_branch",
    f"DELETE {_REPO}/(?P<kind>branch|tag)/{_AT}": "delete", f"POST {_REPO}/tag/{_AT}": "create_tag",
    f"GET {_REPO}/commits/{_AT}": "commits", f"POST {_REPO}/preupload/{_AT}": "preupload",
    f"POST {_REPO}/commit/{_AT}": "commit", f"GET {_REPO}/xet-(?P<kind>read|write)-token/{_AT}": "xet",
    "POST /(?P<repo>[^/]+/[^/]+)[.]git/info/lfs/objects/batch": "batch", "POST /_verify": "verify",
    f"PUT {_STORAGE}": "put", f"GET {_STORAGE}": "get", f"PUT {_STORAGE}/part/(?P<number>[0-9]+)": "part",
    f"POST {_STORAGE}/complete": "complete",
    f"GET (/datasets)?/(?P<repo>[^/]+/[^/]+)/resolve/{_AT}/(?P<path>.+)": "resolve",
}  # fmt: skip


def _entry(name: str, file: Stored) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": file.size, "oid": file.blob}
    if file.sha256:
        size = len(pointer(file.sha256, file.size))
        entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": size}
    return entry | ({"xetHash": file.xet} if file.xet else {})


@contextmanager
def hub(root: Path, *, xet: bool = False, part_size: int = 0, page: int = 1000) -> Iterator[LookAlike]:
    """Run a stand-in for the duration of a block."""
    with answering(LookAlike(root, xet=xet, part_size=part_size, page=page)) as server:
        yield server


def use_hub(patch: pytest.MonkeyPatch, url: str, directory: Path, token: str = "") -> None:
    """Point this process to a Hub, with an empty cache in ``directory``, LFS, and only this token."""
    from huggingface_hub import constants

    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_OIDC_RESOURCE", "HF_OIDC_ID_TOKEN"):
        patch.delenv(name, raising=False)
    if token:
        patch.setenv("HF_TOKEN", token)
    patch.setenv("HF_ENDPOINT", url)
    # The library read these from the environment when it was imported.
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_CACHE", str(directory / "cache"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(directory / "no-token"))
