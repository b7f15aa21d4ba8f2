"""Read and move aliases in a bucket. Each is a small object next to the pointer and is written under a guard."""

from __future__ import annotations

from pydantic import ValidationError

from mergegate.merge_core.errors import Refused
from mergegate.tasks.publish.targets.alias import is_a_version, no_such_version
from mergegate.tasks.publish.targets.s3.access import S3Location, status_code
from mergegate.tasks.publish.targets.s3.publication import parse_pointer
from mergegate.tasks.publish.targets.s3.state import POINTER, Pointer, ReleasedVersion

_ROUNDS = 5


def move_alias(location: S3Location, version: str, name: str) -> None:
    """Point ``name`` to ``version``. A concurrent move is detected, and the state is read again.

    Raises:
        InvalidInput: There is no such version, or ``name`` is a version.
        Refused: Another process keeps writing the alias, or the object is not an alias.
    """
    stored = location.read(POINTER)
    pointer = parse_pointer(location, stored[0]) if stored else Pointer(current="", versions=())
    if pointer.named(name):
        raise is_a_version(name, location.url)
    target = pointer.named(version)
    if target is None:
        raise no_such_version(version, location.url, [item.version for item in pointer.versions])
    for _ in range(_ROUNDS):
        current = read_alias(location, name)
        if current is not None and current[0] == target:
            return
        _write(location, name, target, current[1] if current else None)
    raise Refused(
        f"{location.url}/{_object(name)}",
        found="somebody else moves it each time that it is moved",
        expected="one who promotes",
        remedy="see who else writes there, then run again",
    )


def read_alias(location: S3Location, name: str) -> tuple[ReleasedVersion, str] | None:
    """Return the version that ``name`` points to and the entity tag of its object, or None.

    Raises:
        Refused: The object is not an alias.
    """
    stored = location.read(_object(name))
    if stored is None:
        return None
    try:
        return ReleasedVersion.model_validate_json(stored[0]), stored[1]
    except ValidationError:
        raise Refused(
            f"{location.url}/{_object(name)}",
            found="no alias of a version",
            expected="what a promotion has written",
            remedy="name the alias otherwise, or see who wrote it",
        ) from None


def _write(location: S3Location, name: str, target: ReleasedVersion, tag: str | None) -> None:
    guard = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
    content = target.model_dump_json(indent=1).encode()
    try:
        location.ask(
            "put_object", Key=location.key(_object(name)), Body=content, ContentType="application/json", **guard
        )
    except Exception as error:
        if status_code(error) not in (404, 409, 412):  # after these the caller reads the state again
            raise


def _object(name: str) -> str:
    return f"{name}.json"
