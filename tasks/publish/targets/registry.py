"""The registry of targets: ours, and those that other packages add under the entry point ``mergegate.targets``.

An entry point's value is a subclass of :class:`~tasks.publish.targets.contract.PublishTarget` or a sequence of them.
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
    """Every target by what a profile says to mean it (``to``).

    Raises:
        InvalidInput: An installed package registers something that is no target, or a name that is taken.
    """
    found: dict[str, type[PublishTarget]] = {_name(target): target for target in _BUILT_IN}
    for point in entry_points(group=GROUP):
        loaded = point.load()
        for target in (loaded,) if isinstance(loaded, type) else tuple(loaded):
            name = _name(target)
            if not name or name in found:
                problem = f"the name {name!r} is taken" if name else "no PublishTarget with a field to: Literal['name']"
                raise InvalidInput(f"entry point {GROUP}:{point.name}", found=problem, remedy="remove that package")
            found[name] = target
    return MappingProxyType(found)


def _name(target: object) -> str:
    """The one word that its field ``to`` takes; empty for what is no target."""
    if not (isinstance(target, type) and issubclass(target, PublishTarget) and "to" in target.model_fields):
        return ""
    annotation = target.model_fields["to"].annotation
    words = typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()
    return words[0] if len(words) == 1 and isinstance(words[0], str) else ""


def find_release(named: str) -> PublishedRelease:
    """The release that a person named, wherever it is. A directory of that name is meant before anything else.

    Raises:
        InvalidInput: when there is none.
    """
    targets = publish_targets().values()
    for target in targets:
        if (release := target.open(named)) is not None:
            return release
    raise InvalidInput(
        named,
        found="no such directory",
        expected=", or ".join(target.known_as for target in targets),
        remedy="check the spelling, the network, and HF_TOKEN for a private repository",
    )


def _kind(target: object) -> str | None:
    """Which of the targets is meant. A directory need not say so."""
    found = target.get("to", "directory") if isinstance(target, Mapping) else getattr(target, "to", None)
    return found if isinstance(found, str) else None


class _AnyTarget:
    """Settings of whichever target ``to`` names. Asked for when a profile's type is made, as packages may add some."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        tagged: list[Any] = [Annotated[target, Tag(name)] for name, target in publish_targets().items()]
        return handler.generate_schema(Annotated[functools.reduce(operator.or_, tagged), Discriminator(_kind)])


Target = Annotated[PublishTarget, _AnyTarget()]
"""The type of a setting that says where a release goes."""
