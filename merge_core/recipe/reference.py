"""Parse references to checkpoints, ``path[@revision][+adapter]``, and find their local directories."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from mergegate.merge_core.errors import FindingLog, InvalidInput
from mergegate.merge_core.recipe.keys import known_mapping, refuse

_DRIVE = re.compile(r"([A-Za-z]):[\\/]")


@dataclass(frozen=True, order=True)
class CheckpointRef:
    """A checkpoint reference in a recipe. ``str(ref)`` is its text form.

    Args:
        path: Local directory or Hub ID (``org/name``).
        revision: Branch, tag or commit of ``path``.
        adapter: LoRA adapter to apply, as written after ``+`` (with its own ``@revision``, if any).
    """

    path: str
    revision: str | None = None
    adapter: str | None = None

    @property
    def name(self) -> str:
        """Last component of the path, for display."""
        return PurePosixPath(self.path).name or self.path

    def __str__(self) -> str:
        return self._text

    @cached_property  # The planner needs the text once per input of every tensor.
    def _text(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        adapter = f"+{self.adapter}" if self.adapter else ""
        return f"{self.path}{revision}{adapter}"


def parse_reference(value: object, location: str, log: FindingLog | None = None) -> CheckpointRef:
    """Read ``path[@revision][+adapter[@revision]]``, or ``{model: {path, revision}, lora: {path, revision}}``.

    Only the mapping form can express a local path that contains ``@`` or ``+``. Its unknown keys cause warnings in
    ``log`` or, without a log, an error.
    """
    if isinstance(value, dict):
        if value.get("override_architecture") is not None:
            raise InvalidInput(
                f"{location}.override_architecture",
                found=f"{value['override_architecture']!r:.60}",
                expected="no such key, because mergegate reads the architecture from the checkpoint",
                remedy="remove it, and correct 'architectures' in the model's config.json",
            )
        content = known_mapping(value, location, ("model", "lora", "override_architecture"), log)
        if "model" not in content:
            raise InvalidInput(
                location, found="no 'model'", expected="{model: {path, revision}, lora: {path, revision}}"
            )
        pairs = [
            _path_and_revision(content.get(key), content.location_of(key), log)
            for key in ("model", "lora")
            if key in content
        ]
        return _reference(*pairs)
    if not isinstance(value, str) or not value.strip():
        raise refuse(value, location, "a model: 'path[@revision][+adapter]'", "write a directory or org/name")
    parts = value.strip().split("+")
    if len(parts) > 2:
        raise InvalidInput(
            location, found=f"{len(parts) - 1} '+' in {value!r}", expected="at most one adapter after '+'"
        )
    return _reference(*(_at(part, location) for part in parts))


def _reference(model: tuple[str, str | None], adapter: tuple[str, str | None] | None = None) -> CheckpointRef:
    written = str(CheckpointRef(*adapter)) if adapter else None
    return CheckpointRef(*model, written)


def resolve_local(ref: CheckpointRef, directory: Path | None) -> Path | None:
    """Return the local directory of a reference, or None for a Hub ID.

    A relative path is searched in ``directory``, which is that of the recipe, and then in the working directory.
    InvalidInput is raised if ``ref`` can only be a local path (absolute, a Windows path, or starting with ``.`` or
    ``~``) and does not exist, or if no directory can have that name.
    """
    path = expand_user_path(ref.path)
    try:
        for start in (directory, Path.cwd()):
            if start is not None and (start / path).is_dir():
                return (start / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # Name too long, no working directory, a loop of links.
        raise InvalidInput(
            str(ref), found=f"the path is not valid: {error}", expected="a checkpoint", remedy="correct the path"
        ) from None
    if "\\" in ref.path or _DRIVE.match(ref.path):
        written = ref.path.replace("\\", "/")
        if drive := _DRIVE.match(ref.path):
            remedy = f"write the path on this machine, in WSL /mnt/{drive[1].lower()}{written[2:]}"
        elif written.startswith("//"):
            remedy = "mount the share, and write the path of the directory on this machine"
        else:
            remedy = f"write {written}"
        raise InvalidInput(
            str(ref),
            found="a Windows path",
            expected="a path on Linux or macOS, with '/' and without a drive",
            remedy=remedy,
        )
    if path.is_absolute() or ref.path.startswith((".", "~")):
        searched = f" in {directory} or in the working directory" if directory and not path.is_absolute() else ""
        raise InvalidInput(
            str(ref), found=f"no such directory{searched}", expected="a checkpoint directory", remedy="correct the path"
        )
    return None


def expand_user_path(text: str) -> Path:
    """Return ``text`` as a path, with ``~`` or ``~name`` expanded to a home directory."""
    try:
        return Path(text).expanduser()
    except ValueError:
        raise InvalidInput(text, found="the path contains an invalid character", expected="a path") from None
    except RuntimeError:
        raise InvalidInput(
            text,
            found="the user or its home directory is unknown on this machine",
            expected="a path",
            remedy="write the absolute path",
        ) from None


def name_in_path(text: str) -> str:
    r"""Return the model name at the end of a path, possibly from another machine: ``base`` for ``E:\models\base``.

    In the Hub's cache, this is the name of the repository: ``base`` for ``.../models--org--base/snapshots/<commit>``.
    """
    parts = [part for part in re.split(r"[\\/]+", text) if part]
    repository = next((part.split("--")[-1] for part in parts if part.startswith("models--")), "")
    return repository or (parts[-1] if parts else "")


def _at(text: str, location: str) -> tuple[str, str | None]:
    path, *revision = text.split("@")
    if len(revision) > 1:
        raise InvalidInput(location, found=f"{len(revision)} '@' in {text!r}", expected="at most one '@revision'")
    if not path.strip() or (revision and not revision[0].strip()):
        raise InvalidInput(location, found=f"an empty part in {text!r}", expected="'path[@revision][+adapter]'")
    return path.strip(), revision[0].strip() if revision else None


def _path_and_revision(value: object, location: str, log: FindingLog | None) -> tuple[str, str | None]:
    if isinstance(value, str) and value:
        return value, None
    if isinstance(value, dict):
        content = known_mapping(value, location, ("path", "revision"), log)
        path, revision = content.get("path"), content.get("revision")
        if isinstance(path, str) and path and (revision is None or isinstance(revision, str)):
            return path, revision
    raise refuse(value, location, "{path: ..., revision: ...}")
