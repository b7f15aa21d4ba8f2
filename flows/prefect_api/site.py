"""A project's own Prefect server: where it is, who may speak to it, and what server, worker and clients are told.

One project has one home, one secret (``<home>/prefect/auth``, readable by its owner only) and one address. Everything
that Prefect reads from the environment is set here, so that nobody has to export anything::

    site = find_site(nights)
    os.execve(python, [...], site.server_environment(database_url(nights)))

Prefect's own command line finds the same in ``prefect.toml``, which ``mergegate server`` writes into the project's
directory (git-ignored, readable by its owner only): Prefect looks there, and nowhere above.
"""

from __future__ import annotations

import os
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mergegate.flows.prefect_api.schedules import Schedules
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import disk_errors_refused, state_directory
from mergegate.merge_core.parsing import open_plain, read_text
from mergegate.tasks.stage import home

SETTINGS = "prefect.toml"
DATABASE = "MERGEGATE_DATABASE"
PORT = 4200
# How often a run says that it is alive; the rule that misses it stands in ``automations``.
HEARTBEAT_S = 30
_OURS = "# Written by mergegate: how Prefect's own command line reaches this project's server. Holds its secret."
_MAX_BYTES = 1 << 16
_DRIVER = "postgresql+asyncpg"


def page_of_run(run: object) -> str:
    """Address of the page of a flow run on the server that this process was told of; empty where there is none: what
    serves a run that has no server is gone with it."""
    api = os.environ.get("PREFECT_API_URL", "")
    address = os.environ.get("PREFECT_UI_URL") or api.removesuffix("/").removesuffix("/api")
    return f"{address.removesuffix('/')}/runs/flow-run/{run}" if run and address else ""


@dataclass(frozen=True)
class Site:
    """Where a project's server is.

    Attributes:
        root: The project's directory, absolute: profiles are named relative to it.
        home: Its state.
        address: What browsers and clients reach the server by: ``http://127.0.0.1:4200``.
        secret: ``user:password`` that it asks for; empty: it asks for none.
    """

    root: Path
    home: Path
    address: str
    secret: str

    @property
    def api(self) -> str:
        """Of the API that stands behind the pages."""
        return f"{self.address}/api"

    def run_page(self, run: object) -> str:
        """Address of the page of a flow run."""
        return f"{self.address}/runs/flow-run/{run}"

    def client_environment(self) -> dict[str, str]:
        """What a client of Prefect has to know, beside all that this process was told."""
        return {
            **os.environ,
            "MERGEGATE_HOME": str(self.home),
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_API_URL": self.api,
            "PREFECT_UI_URL": self.address,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "0",
            "DO_NOT_TRACK": "1",
            **({"PREFECT_API_AUTH_STRING": self.secret} if self.secret else {}),
        }

    def worker_environment(self) -> dict[str, str]:
        """The same for a worker, whose runs say often enough that they are alive to be missed when they do not, and ask
        again when the server has lost its database for a moment: that is a 500, which Prefect takes for an answer."""
        own = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S), "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500"}
        return own | self.client_environment()

    def server_environment(self, database: str | None) -> dict[str, str]:
        """The same for the server itself.

        Args:
            database: Address of a PostgreSQL database, as Prefect wants it; None: a file below the home.
        """
        own = {
            **self.client_environment(),
            # Anybody on this machine reaches a port of the loopback, and any web page in a browser on it.
            "PREFECT_SERVER_API_AUTH_STRING": self.secret,
            "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "1",
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": self.address,
            # Slots that are held must outlive a restart of the server: they are in its memory otherwise.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        }
        if database:
            own["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = database
        return own


def find_site(nights: Schedules | None = None, *, address: str | None = None) -> Site:
    """The site of the project in the working directory.

    The address is what a caller says, else ``PREFECT_API_URL``, else ``nights.yaml``, else where ``mergegate server``
    was last started here. The secret is ``PREFECT_API_AUTH_STRING``, else the project's own, if there is one.

    Raises:
        InvalidInput: for an address that is none.
    """
    said = {
        "--address": address,
        "PREFECT_API_URL": os.environ.get("PREFECT_API_URL"),
        "nights.yaml: server.address": nights.server.address if nights else None,
        SETTINGS: own_settings().get("url"),
    }
    where, found = next(((where, one) for where, one in said.items() if one), ("", f"http://127.0.0.1:{PORT}"))
    plain = found.rstrip("/").removesuffix("/api")
    if urlsplit(plain).scheme not in ("http", "https") or not urlsplit(plain).netloc:
        raise InvalidInput(where, found=repr(found), expected="an address such as http://127.0.0.1:4200/api")
    secret = os.environ.get("PREFECT_API_AUTH_STRING") or _read_secret(_secret_file())
    return Site(Path.cwd(), home(), plain, secret)


def load_or_create_secret() -> str:
    """The project's secret, drawn when there is none: ``PREFECT_API_AUTH_STRING``, else what its file says.

    Raises:
        DiskRefused: when it cannot be kept.
    """
    if said := os.environ.get("PREFECT_API_AUTH_STRING"):
        return said
    file = _secret_file()
    with disk_errors_refused(file):
        state_directory(file.parent, private=True)
        if not (secret := _read_secret(file)):
            secret = f"mergegate:{secrets.token_urlsafe(32)}"
            _write_private(file, secret)
        file.chmod(0o600)
    return secret


def write_settings(site: Site) -> bool:
    """Tell Prefect's own command line of the site; False where a ``prefect.toml`` of somebody else is left alone.

    Raises:
        DiskRefused: when it cannot be written.
    """
    file = site.root / SETTINGS
    if file.exists() and not _is_ours(file):
        return False
    quoted = {name: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' for name, text in _told(site).items()}
    lines = [
        _OURS,
        f"home = {quoted['home']}",
        "[api]",
        f"url = {quoted['url']}",
        f"auth_string = {quoted['secret']}",
        "[server]",
        "analytics_enabled = false",
        "",
    ]
    with disk_errors_refused(file):
        _write_private(file, "\n".join(lines))
    return True


def own_settings() -> Mapping[str, str]:
    """What the project's ``prefect.toml`` says of the server (``url``, ``auth_string``), where it is one of ours."""
    file = Path(SETTINGS)
    if not _is_ours(file):
        return {}
    try:
        found = tomllib.loads(read_text(file, _MAX_BYTES)).get("api", {})
    except (InvalidInput, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def database_url(nights: Schedules | None) -> str | None:
    """Where the server keeps its records: ``MERGEGATE_DATABASE``, else ``nights.yaml``; None: in a file.

    Raises:
        InvalidInput: for anything but PostgreSQL.
    """
    said, where = os.environ.get(DATABASE, ""), DATABASE
    if not said and nights is not None and nights.server.database:
        said, where = nights.server.database, "nights.yaml: server.database"
    if not said:
        return None
    scheme, _, rest = said.partition("://")
    if scheme not in ("postgresql", "postgres", _DRIVER) or not rest:
        raise InvalidInput(
            where,
            found=f"an address that begins with {scheme!r}",
            expected="postgresql://user@host:5432/name",
            remedy="several people need PostgreSQL; leave it out, and the records are in a file of this project",
        )
    return f"{_DRIVER}://{rest}"


def require_database(url: str) -> None:
    """See that the database answers: Prefect's server says so in two hundred lines.

    Raises:
        InvalidInput: when it does not.
    """
    import asyncio

    import asyncpg  # type: ignore[import-untyped]  # it ships none

    plain = url.replace(_DRIVER, "postgresql", 1)

    async def ask() -> None:
        connection = await asyncpg.connect(plain, timeout=10)
        await connection.close()

    try:
        asyncio.run(ask())
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        address = urlsplit(plain)
        raise InvalidInput(
            f"the database at {address.hostname}:{address.port or 5432}{address.path}",
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            expected="PostgreSQL that lets us in",
            remedy="start it, correct the address, or set PGPASSWORD",
        ) from None


def require_site(site: Site) -> None:
    """See that the server answers and lets us in, rather than have every call fail one by one.

    Raises:
        InvalidInput: when it does not.
    """
    import httpx

    known = tuple(site.secret.split(":", 1)) if ":" in site.secret else None
    try:
        answer = httpx.get(f"{site.api}/admin/version", auth=known, timeout=10)  # type: ignore[arg-type]  # of two
    except httpx.HTTPError as error:
        raise InvalidInput(
            site.address,
            found=f"no server answers ({error})",
            expected="this project's Prefect server",
            remedy="start it (mergegate server), or say where it is: PREFECT_API_URL, or server.address in nights.yaml",
        ) from None
    if answer.status_code in (401, 403):
        raise InvalidInput(
            site.address,
            found="it does not know our secret" if site.secret else "it asks for a secret",
            expected=f"PREFECT_API_AUTH_STRING, or what stands in {_secret_file()}",
            remedy="it may be the server of another project; copy the secret of that one, or start ours elsewhere "
            "(mergegate server --port)",
        )
    if answer.status_code != 200:
        raise InvalidInput(
            site.address, found=f"it answers with {answer.status_code}", expected="this project's Prefect server"
        )


def _secret_file() -> Path:
    return home() / "prefect" / "auth"


def _read_secret(file: Path) -> str:
    """What is damaged is drawn anew: nobody knows it."""
    try:
        said = read_text(file, _MAX_BYTES).strip()
    except InvalidInput:
        return ""
    return said if ":" in said and said.isprintable() else ""


def _is_ours(file: Path) -> bool:
    try:
        with open_plain(file) as settings:
            return settings.read(len(_OURS) + 1) == f"{_OURS}\n".encode()
    except (InvalidInput, OSError):
        return False


def _told(site: Site) -> dict[str, str]:
    return {"home": str(site.home / "prefect"), "url": site.api, "secret": site.secret}


def _write_private(file: Path, text: str) -> None:
    """As a whole or not at all, and never readable by others, not even for a moment."""
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as output:
            output.write(text)
            output.flush()
            os.fsync(output.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
