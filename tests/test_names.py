"""A name is a noun with a qualifier, or a verb with an object: never a bare participle, pronoun or adverb."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from test_architecture import MODULES, tree


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PRONOUNS = words(
    """
    beside both each here it its one ones other others own rest that them there these they this those what whatever
    where which whole who whom whose without
    """
)
_IRREGULAR = words(
    """
    begun bound broken brought built caught chosen come cut done drawn driven due fallen found frozen given gone
    grown heard held hidden kept known laid led left lent lost made meant met put read said seen sent set shown
    split spoken spent taken thought told torn understood won worn written
    """
)
# Gerunds and vague nouns, which say nothing as the name of a module.
_VAGUE = words(
    """
    asking applying arranging division explaining factoring fetching following holes joining judging keeping kinds
    looking looks measuring outside pace place places racing reading rearming serving sharing sums waiting watching
    words writing
    """
)
# Words that end like a participle, and nouns that are spelled like one.
_NOUNS = frozenset({"bound", "cut", "feed", "need", "read", "seed", "set", "speed", "split"})

PARAMETERS = {
    "expected": "every error has a location, the state that was found and the state that was expected",
    "found": "see `expected`",
    "gated": "the Hub's own name for a repository with access on request",
    "left": "one side, next to `right`",
}
FUNCTIONS = {"compiled": "a decorator reads as an adjective: @compiled"}
MODULE_NAMES = {"shared": "tasks.base.store.shared: the package is its noun"}


def is_bare(name: str) -> bool:
    """Return whether a name is one word that needs a noun: a participle, a pronoun or an adverb."""
    word = name.strip("_")
    return word in _PRONOUNS or (
        word not in _NOUNS and (word in _IRREGULAR or re.fullmatch("[a-z]{2,}ed", word) is not None)
    )


@cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (f"{module}:{node.lineno} {node.name}", node)
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def is_stage(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a stage, whose parameter names are part of its cache keys."""
    return any("stage(" in ast.unparse(decorator) for decorator in node.decorator_list)


def is_flag(annotation: ast.expr | None) -> bool:
    """Return whether a parameter or a result is a flag, which may be an adjective: ``required: bool``."""
    return annotation is not None and ast.unparse(annotation) in ("bool", "bool | None", "Literal[False]")


@pytest.mark.story
def test_parameters_are_not_bare_participles_or_pronouns() -> None:
    bare = [
        f"{location}({parameter.arg})"
        for location, node in functions()
        for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if is_bare(parameter.arg) and parameter.arg not in PARAMETERS and not is_flag(parameter.annotation)
        if not (node.name.startswith("__") and parameter.arg == "other")  # Python's own name for the second operand
        if not is_stage(node)
    ]
    assert bare == []


@pytest.mark.story
def test_public_functions_are_not_bare_participles_or_pronouns() -> None:
    bare = [
        location
        for location, node in functions()
        if is_bare(node.name) and not node.name.startswith("_") and not is_flag(node.returns)
    ]
    assert [location for location in bare if location.rpartition(" ")[2] not in FUNCTIONS] == []


def test_modules_are_not_bare_participles_or_pronouns() -> None:
    names = {module: module.rpartition(".")[2] for module in MODULES}
    bare = {module for module, name in names.items() if is_bare(name) or name in _VAGUE}
    assert {module for module in bare if names[module] not in MODULE_NAMES} == set()


@pytest.mark.story
def test_every_exception_is_needed() -> None:
    names = {parameter.arg for _, node in functions() for parameter in (*node.args.args, *node.args.kwonlyargs)}
    names |= {node.name for _, node in functions()} | {module.rpartition(".")[2] for module in MODULES}
    assert (PARAMETERS.keys() | FUNCTIONS.keys() | MODULE_NAMES.keys()) - names == set()


@pytest.mark.parametrize("name", ["asked", "_found", "other", "where", "kept", "written"])
def test_a_bare_word_is_detected(name: str) -> None:
    assert is_bare(name)


@pytest.mark.parametrize("name", ["merged_model", "location", "seed", "read_recipe", "speed", "is_shared"])
def test_a_noun_or_a_verb_with_an_object_is_not(name: str) -> None:
    assert not is_bare(name)
