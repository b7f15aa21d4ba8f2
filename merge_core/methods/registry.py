"""Find merge methods by name, both the built-in ones and those of other packages.

Other packages register a :class:`~merge_core.methods.contract.Method`, or a sequence of them, as an entry point of the
group ``mergegate.methods``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.methods import combination, elementwise, regression, spectral, spherical, task_vectors
from mergegate.merge_core.methods.contract import Method

GROUP = "mergegate.methods"
# Messages list methods in this order, and a draft of a recipe uses the first that fits.
BUILT_IN = (
    *combination.METHODS,
    *spherical.METHODS,
    *task_vectors.METHODS,
    *elementwise.METHODS,
    spherical.MODEL_STOCK,
    task_vectors.SCE,
    *elementwise.WITH_ONE_MODEL,
    *regression.METHODS,
    combination.FISHER,
    *spectral.METHODS,
)


@cache
def merge_methods() -> Mapping[str, Method]:
    """Return all merge methods by name.

    Raises:
        InvalidInput: An installed package registers an object that is not a Method, or a name that is already taken.
    """
    methods = {method.name: method for method in BUILT_IN}
    for point in entry_points(group=GROUP):
        loaded = point.load()
        for method in (loaded,) if isinstance(loaded, Method) else tuple(loaded):
            if not isinstance(method, Method) or method.name in methods:
                problem = f"the name {method.name!r}, which is taken" if isinstance(method, Method) else "not a Method"
                raise InvalidInput(
                    f"entry point {GROUP}:{point.name}",
                    found=problem,
                    expected="merge methods with unused names",
                    remedy="uninstall the package that registers it",
                )
            methods[method.name] = method
    return MappingProxyType(methods)


def find_method(name: object, location: str) -> Method:
    """Return the method with this name, or raise InvalidInput with ``location`` if there is none."""
    method = merge_methods().get(name) if isinstance(name, str) else None
    if method is None:
        raise InvalidInput(
            location,
            found=f"unknown merge method {name!r}",
            expected="a merge method",
            remedy=suggest(str(name), merge_methods()),
        )
    return method
