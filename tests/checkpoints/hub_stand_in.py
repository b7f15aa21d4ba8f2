"""A fake Hugging Face Hub on loopback, with just enough of its HTTP API for one chain of library calls.

It has no redirects to storage, no LFS and no Xet. It serves the given repositories, honors ranges, and counts every
byte of every file that it sends.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from loopback import answering

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandIn(ThreadingHTTPServer):
    """A server for the directories in ``repositories`` (``org/name`` → path).

    Args:
        repositories: Directories by repository name.
        honours_ranges: Whether a ranged read returns only that range instead of the whole file.
    """

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Path], *, honours_ranges: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.repositories, self.honours_ranges = repositories, honours_ranges
        self.served: Counter[str] = Counter()
        self.tokens: set[str | None] = set()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Value for ``HF_ENDPOINT``."""
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(repositories: Mapping[str, Path], *, honours_ranges: bool = True) -> Iterator[StandIn]:
    """Run a fake Hub for the duration of the block."""
    with answering(StandIn(repositories, honours_ranges=honours_ranges)) as server:
        yield server


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, *_: object) -> None:
        """Suppress the request log."""

    def do_HEAD(self) -> None:
        """Send the headers of a file without its content."""
        self.do_GET()

    def do_GET(self) -> None:
        """Send repository metadata, the file tree or a file."""
        self.server.tokens.add(self.headers.get("Authorization"))
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repository = self.server.repositories.get("/".join(parts[2:4]))
            if repository is not None:
                self._json(_tree(repository) if parts[4:5] == ["tree"] else {"id": "/".join(parts[2:4]), "sha": COMMIT})
                return
        elif parts[2:3] == ["resolve"] and "/".join(parts[:2]) in self.server.repositories:
            file = self.server.repositories["/".join(parts[:2])].joinpath(*parts[4:])
            if file.is_file():
                self._file(file)
                return
        self._respond(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _json(self, content: object) -> None:
        self._respond(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _file(self, file: Path) -> None:
        size = file.stat().st_size
        start, stop, status = 0, size, 200
        facts = {"ETag": f'"{file.name}-{size}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted and self.server.honours_ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), min(int(last) + 1, size) if last else size, 206
            facts["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self.send_response(status)
        for name, value in {**facts, "Content-Length": str(stop - start)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with file.open("rb") as opened:
            opened.seek(start)
            try:
                while start < stop:
                    chunk = opened.read(min(1 << 16, stop - start))
                    self.wfile.write(chunk)
                    start += len(chunk)
                    with self.server.lock:
                        self.server.served[f"{file.parent.name}/{file.name}"] += len(chunk)
            except OSError:
                self.close_connection = True  # The client closed the connection early.

    def _respond(self, status: int, body: bytes, facts: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**facts, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _tree(repository: Path) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40}
        for path in sorted(repository.iterdir())
    ]
