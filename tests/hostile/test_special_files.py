"""LocalPath, the type of every path that users write, and special files in place of user-specified files."""

from __future__ import annotations

import os
import signal
import types
import typing
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from patience import HANG_S
from pydantic import BaseModel, TypeAdapter, ValidationError

from mergegate.flows.prefect_api.schedules import Schedules, load_schedules
from mergegate.flows.profile import Profile, load_profile, parse_profile
from mergegate.merge_core import load_recipe
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.files.hashing import sha256_file
from mergegate.merge_core.parsing import MAX_DATA_BYTES, LocalPath
from mergegate.tasks.preflight.licenses.table import load_table
from mergegate.tasks.quality.judge.answers import pin_prompts
from mergegate.tasks.quality.judge.settings import JudgeSettings
from mergegate.tasks.quality.perplexity.text import TextSetting, pin_text
from mergegate.tasks.release.publish.signing import private_key, public_key
from mergegate.tasks.release.publish.targets import publish_targets
from mergegate.tasks.shadow.traffic.replay import read_traffic

PATH = TypeAdapter(LocalPath)


@given(st.text(max_size=300) | st.integers(0, 5000).map(lambda count: "x/" * count) | st.text("é/", max_size=300))
@example("")
@example("a\0b")
@example("\udcff")
@example("é" * 127)
@example("é" * 128)
def test_a_path_is_accepted_if_the_system_could_have_it(text: str) -> None:
    """The kernel is the oracle: for a possible path it reports a missing file, not an invalid path."""
    try:
        os.lstat(text)
        possible = True
    except FileNotFoundError:
        possible = bool(text)
    except (NotADirectoryError, PermissionError):
        possible = True
    except (OSError, ValueError):
        possible = False
    try:
        accepted = PATH.validate_python(text) == Path(text)
    except ValidationError:
        accepted = False
    # The kernel stops at the first missing component, so it never checks the length of later ones.
    assert accepted == possible or (possible and max(len(os.fsencode(part)) for part in text.split("/")) > 255)


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"publish": {"to": "directory", "path": "a\0b"}}, "publish.path"),
        ({"publish": {"to": "directory", "path": ""}}, "publish.path"),
        ({"publish": {"to": "directory", "path": "x" * 256, "sign_key": "a\0b"}}, "publish.sign_key"),
        ({"recipe": "a\0b"}, "recipe"),
        ({"remedies": ["é" * 128]}, "remedies[0]"),
        ({"perplexity": {"documents": "a\0b", "max_drift": 0.05}}, "perplexity.documents"),
        ({"checks": {"license": {"table": ""}}}, "checks.license.table"),
    ],
)
def test_a_profile_names_the_field_of_an_impossible_path(keys: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        parse_profile({"name": "demo", "recipe": "recipe.yaml", **keys}, "profile.yaml")
    assert where in str(refusal.value)


def annotations(model: type[BaseModel], seen: set[type]) -> Iterator[tuple[str, Any]]:
    """Yield every field of a model and of its nested models, with the full annotation."""
    if model in seen:
        return
    seen.add(model)
    hints = typing.get_type_hints(model, include_extras=True)
    for name in model.model_fields:
        yield f"{model.__name__}.{name}", hints[name]
        for inner in models_in(hints[name]):
            yield from annotations(inner, seen)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for part in typing.get_args(annotation):
        yield from models_in(part)


def has_bare_path(annotation: Any) -> bool:
    # `Annotated` flattens, so a path with more metadata is compared by its first parts.
    if getattr(annotation, "__metadata__", ())[: len(LocalPath.__metadata__)] == LocalPath.__metadata__:
        return False
    return annotation is Path or any(has_bare_path(part) for part in typing.get_args(annotation))


def test_no_setting_has_a_path_of_another_type() -> None:
    seen: set[type] = set()
    fields = [
        field for model in (Profile, Schedules, *publish_targets().values()) for field in annotations(model, seen)
    ]
    assert sum(str(LocalPath) in str(annotation) for _, annotation in fields) > 8
    assert [name for name, annotation in fields if has_bare_path(annotation)] == []


KINDS: dict[str, Callable[[Path], None]] = {
    "a named pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "no file": lambda path: None,
    "a huge file": lambda path: path.touch() or os.truncate(path, MAX_DATA_BYTES + 1),  # type: ignore[func-returns-value]
}
READERS: dict[str, Callable[[Path], object]] = {
    "profile": load_profile, "recipe": load_recipe, "schedules": load_schedules, "license table": load_table,
    "public key": public_key, "private key": private_key,
    "held-out text": lambda path: pin_text(path, "text", HashMemo(path.parent / "hashes"), TextSetting("documents")),
    "prompts": lambda path: pin_prompts(
        JudgeSettings(url="http://localhost:1", model="judge", guarded_by="base", prompts=path),
        path.parent,
        HashMemo(path.parent / "hashes"),
    ),
    "traffic": lambda path: read_traffic(path, "model"),
}  # fmt: skip


@pytest.fixture
def no_hang() -> Iterator[None]:
    """Fail a test that waits for a pipe."""

    def fail(signal_number: int, frame: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(int(HANG_S))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


NOT_PLAIN = ("a named pipe", "a directory", "a device")


@pytest.mark.usefixtures("no_hang")
@pytest.mark.parametrize(("reader", "kind"), [*product(READERS, KINDS), *product(["hash"], NOT_PLAIN)])
def test_a_reader_refuses_what_is_not_a_plain_file(tmp_path: Path, reader: str, kind: str) -> None:
    path = tmp_path / "named.jsonl"
    KINDS[kind](path)
    with pytest.raises(InvalidInput) as refusal:
        READERS.get(reader, sha256_file)(path)
    if kind in NOT_PLAIN:
        assert refusal.value.found == kind
        assert path.name in refusal.value.where
