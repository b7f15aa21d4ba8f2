"""Names that mean one of the versions in a bucket: a small object each beside the pointer, written under a guard."""

from __future__ import annotations

from pydantic import ValidationError

from mergegate.merge_core.errors import Refused
from mergegate.tasks.publish.targets.alias import is_a_version, no_such_version
from mergegate.tasks.publish.targets.s3.access import S3Place, status_code
from mergegate.tasks.publish.targets.s3.publication import parse_pointer
from mergegate.tasks.publish.targets.s3.state import POINTER, Pointer, ReleasedVersion

_ROUNDS = 5


def move_alias(place: S3Place, version: str, name: str) -> None:
    """Have ``name`` mean ``version``; whoever else moves it at the same time is noticed, and looked at again.

    Raises:
        InvalidInput: when there is no such version, or ``name`` is one.
        Refused: when somebody writes there all the time, or what lies there is no alias.
    """
    there = place.read(POINTER)
    pointer = parse_pointer(place, there[0]) if there else Pointer(current="", versions=())
    if pointer.named(name):
        raise is_a_version(name, place.url)
    wanted = pointer.named(version)
    if wanted is None:
        raise no_such_version(version, place.url, [one.version for one in pointer.versions])
    for _ in range(_ROUNDS):
        found = read_alias(place, name)
        if found is not None and found[0] == wanted:
            return
        _write(place, name, wanted, found[1] if found else None)
    raise Refused(
        f"{place.url}/{_object(name)}",
        found="somebody else moves it each time that it is moved",
        expected="one who promotes",
        remedy="see who else writes there, then run again",
    )


def read_alias(place: S3Place, name: str) -> tuple[ReleasedVersion, str] | None:
    """What ``name`` means, and the entity tag of the object that says so; None: nothing.

    Raises:
        Refused: when it is something else than an alias.
    """
    there = place.read(_object(name))
    if there is None:
        return None
    try:
        return ReleasedVersion.model_validate_json(there[0]), there[1]
    except ValidationError:
        raise Refused(
            f"{place.url}/{_object(name)}",
            found="no alias of a version",
            expected="what a promotion has written",
            remedy="name the alias otherwise, or see who wrote it",
        ) from None


def _write(place: S3Place, name: str, wanted: ReleasedVersion, tag: str | None) -> None:
    guard = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
    content = wanted.model_dump_json(indent=1).encode()
    try:
        place.ask("put_object", Key=place.key(_object(name)), Body=content, ContentType="application/json", **guard)
    except Exception as error:
        if status_code(error) not in (404, 409, 412):  # of those the next look tells
            raise


def _object(name: str) -> str:
    return f"{name}.json"
