"""LocalPath, the type of every path that users write."""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from mergegate.flows.prefect_api.schedules import Schedules
from mergegate.flows.profile import Profile, parse_profile
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import LocalPath
from mergegate.tasks.publish.targets import publish_targets

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
