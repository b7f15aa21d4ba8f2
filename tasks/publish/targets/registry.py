"""Find the available targets: the built-in ones and those of the entry point ``mergegate.targets``.

The value of an entry point is a subclass of ``PublishTarget`` or a sequence of them.
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
from mergegate.tasks.publish.targets.contract import PublishedRelease, PublishTarget
from mergegate.tasks.publish.targets.directory import DirectoryTarget
from mergegate.tasks.publish.targets.hub import HubTarget
from mergegate.tasks.publish.targets.mlflow import MlflowTarget
from mergegate.tasks.publish.targets.oci import OciTarget
from mergegate.tasks.publish.targets.s3 import S3Target

GROUP = "mergegate.targets"
_BUILT_IN = (DirectoryTarget, HubTarget, S3Target, OciTarget, MlflowTarget)


@cache
def publish_targets() -> Mapping[str, type[PublishTarget]]:
    """Return every target by its name in a profile (``to``).

    Raise InvalidInput if an installed package registers an object that is not a target, or a name that is taken.
    """
    targets: dict[str, type[PublishTarget]] = {_name(target): target for target in _BUILT_IN}
    for point in entry_points(group=GROUP):
        loaded = point.load()
        for target in (loaded,) if isinstance(loaded, type) else tuple(loaded):
            name = _name(target)
            if not name or name in targets:
                problem = f"the name {name!r} is already in use" if name else f"{target!r}"
                raise InvalidInput(
                    f"entry point {GROUP}:{point.name}",
                    found=problem,
                    expected="a PublishTarget with a field to: Literal['name'] and a name of its own",
                    remedy="uninstall the package that registers it",
                )
            targets[name] = target
    return MappingProxyType(targets)


def _name(target: object) -> str:
    """Return the name of a target (its field ``to``), or an empty string if ``target`` is not a target."""
    if not (isinstance(target, type) and issubclass(target, PublishTarget) and "to" in target.model_fields):
        return ""
    annotation = target.model_fields["to"].annotation
    words = typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()
    return words[0] if len(words) == 1 and isinstance(words[0], str) else ""


def find_release(reference: str) -> PublishedRelease:
    """Open the release that a user's reference names. A local directory takes precedence over other targets.

    Raise InvalidInput if there is no such release.
    """
    targets = publish_targets().values()
    for target in targets:
        if (release := target.open(reference)) is not None:
            return release
    raise InvalidInput(
        reference,
        found="no such directory",
        expected=", or ".join(target.reference_form for target in targets),
        remedy="check the spelling, the network, and HF_TOKEN for a private repository",
    )


class _AnyTarget:
    """Settings of any target, selected by ``to``.

    The union is resolved when a profile's schema is built, because other packages may add targets.
    """

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:

        def select(target: object) -> str | None:
            name = target.get("to", "directory") if isinstance(target, Mapping) else getattr(target, "to", None)
            return name if isinstance(name, str) else None

        tagged: list[Any] = [Annotated[target, Tag(name)] for name, target in publish_targets().items()]
        return handler.generate_schema(Annotated[functools.reduce(operator.or_, tagged), Discriminator(select)])


Target = Annotated[PublishTarget, _AnyTarget()]
"""Type of a profile setting that selects a target."""
