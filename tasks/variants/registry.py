"""Find the available variant formats: the built-in ones and those of the entry point ``mergegate.variants``.

The value of an entry point is a subclass of ``VariantFormat`` or a sequence of them.
"""

from __future__ import annotations

import functools
import operator
import typing
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.variants.compressed_tensors import CompressedTensorsFormat
from mergegate.tasks.variants.contract import VariantFormat
from mergegate.tasks.variants.gguf import GgufFormat

GROUP = "mergegate.variants"
_BUILT_IN = (GgufFormat, CompressedTensorsFormat)


@cache
def variant_formats() -> Mapping[str, type[VariantFormat]]:
    """Return every format by its name in a profile (``format``).

    Raises:
        InvalidInput: An installed package registers an object that is not a format, or a name that is taken.
    """
    formats: dict[str, type[VariantFormat]] = {_name(each): each for each in _BUILT_IN}
    for point in entry_points(group=GROUP):
        loaded = point.load()
        for each in (loaded,) if isinstance(loaded, type) else tuple(loaded):
            name = _name(each)
            if not name or name in formats:
                raise InvalidInput(
                    f"entry point {GROUP}:{point.name}",
                    found=f"the name {name!r} is already in use" if name else f"{each!r}",
                    expected="a VariantFormat with a field format: Literal['name'] and a name of its own",
                    remedy="uninstall the package that registers it",
                )
            formats[name] = each
    return MappingProxyType(formats)


def _name(variant_format: object) -> str:
    """Return the name of a format (its field ``format``), or an empty string if the object is not a format."""
    if not (isinstance(variant_format, type) and issubclass(variant_format, VariantFormat)):
        return ""
    field = variant_format.model_fields.get("format")
    words = typing.get_args(field.annotation) if field and typing.get_origin(field.annotation) is Literal else ()
    return words[0] if len(words) == 1 and isinstance(words[0], str) else ""


class _AnyFormat:
    """Settings of any format, selected by ``format``.

    The union is resolved when a profile's schema is built, because other packages may add formats.
    """

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:

        def select(variant: object) -> str | None:
            name = variant.get("format") if isinstance(variant, Mapping) else getattr(variant, "format", None)
            return name if isinstance(name, str) else None

        tagged: list[Any] = [Annotated[each, Tag(name)] for name, each in variant_formats().items()]
        return handler.generate_schema(Annotated[functools.reduce(operator.or_, tagged), Discriminator(select)])


Variant = Annotated[VariantFormat, _AnyFormat()]
"""Type of a profile setting that selects a variant format."""
