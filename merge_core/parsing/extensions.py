"""Collect classes of settings that other packages add, and select one of them by a field that names it.

Publishing targets and variant formats use this: ``publish: {to: directory}`` selects the class with the field
``to: Literal["directory"]``.
"""

from __future__ import annotations

import functools
import operator
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema

from mergegate.merge_core.errors import InvalidInput

T = TypeVar("T", bound=BaseModel)


def collect_settings(
    base: type, field: str, built_in: Sequence[type[T]], points: Iterable[EntryPoint], group: str
) -> Mapping[str, type[T]]:
    """Return the built-in classes and those of entry points, by the name in ``field``.

    Args:
        base: Class that all of them extend.
        field: Field of each class whose type is ``Literal["name"]``.
        built_in: Classes of mergegate.
        points: Entry points. The value of each is a class or a sequence of classes.
        group: Group of the entry points, for messages.

    Raises:
        InvalidInput: An installed package registers an object that is not such a class, or a name that is taken.
    """
    classes = {_name(each, base, field): each for each in built_in}
    for point in points:
        loaded = point.load()
        for each in (loaded,) if isinstance(loaded, type) else tuple(loaded):
            name = _name(each, base, field)
            if not name or name in classes:
                raise InvalidInput(
                    f"entry point {group}:{point.name}",
                    found=f"the name {name!r} is already in use" if name else f"{each!r}",
                    expected=f"a {base.__name__} with a field {field}: Literal['name'] and a name of its own",
                    remedy="uninstall the package that registers it",
                )
            classes[name] = each
    return MappingProxyType(classes)


def _name(candidate: object, base: type, field: str) -> str:
    """Return the name of a class, or an empty string if ``candidate`` does not extend ``base`` or has no name."""
    fields = getattr(candidate, "model_fields", {})
    if not (isinstance(candidate, type) and issubclass(candidate, base) and field in fields):
        return ""
    annotation = fields[field].annotation
    words = typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()
    return words[0] if len(words) == 1 and isinstance(words[0], str) else ""


@dataclass(frozen=True)
class SelectedBy:
    """Annotation of a setting that accepts any of several classes: ``Annotated[Base, SelectedBy("to", classes)]``.

    The union is resolved when a schema is built, because other packages may add classes.

    Args:
        field: Field that names the class.
        classes: Returns the classes by name.
        default: Name of the class if the field is missing.
    """

    field: str
    classes: Callable[[], Mapping[str, type[BaseModel]]]
    default: str | None = None

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        def select(value: object) -> str | None:
            if isinstance(value, Mapping):
                name = value.get(self.field, self.default)
            else:
                name = getattr(value, self.field, None)
            return name if isinstance(name, str) else None

        tagged: list[Any] = [Annotated[each, Tag(name)] for name, each in self.classes().items()]
        return handler.generate_schema(Annotated[functools.reduce(operator.or_, tagged), Discriminator(select)])
