"""Test the names of local models in published files and the scan for private paths before a release."""

from __future__ import annotations

import html
import io
import json
import tempfile
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from mergegate.flows.operations.console import FittingConsole
from mergegate.merge_core import load_recipe
from mergegate.merge_core.errors import Refused
from mergegate.tasks.release.publish.content import written_file
from mergegate.tasks.release.publish.documents.card import escape
from mergegate.tasks.release.publish.public_names import PublicNames, require_no_private_paths
from mergegate.tasks.release.report.page import environment

SECRET = "/srv/alice smith/projé"
PARTS = st.text(alphabet="abé .-_'&", min_size=1, max_size=5).filter(lambda text: text.strip(". ") == text)
PATHS = st.lists(PARTS, min_size=1, max_size=3).map(lambda parts: "/".join([SECRET, *parts]))


def names_of(*models: str, root: str = f"{SECRET}/here") -> PublicNames:
    entries = [{"model": {"model": {"path": model}}, "parameters": {"weight": 1.0}} for model in models]
    recipe = load_recipe({"merge_method": "linear", "models": entries})
    return PublicNames.from_recipe(recipe, [], Path(root))


@pytest.mark.story
@given(paths=st.lists(PATHS, min_size=1, max_size=4, unique=True), style=st.sampled_from(['"', "'", None]))
def test_a_renamed_recipe_names_no_directory_and_keeps_its_models_apart(paths: list[str], style: str | None) -> None:
    recipe = {"models": [{"model": path, "lora": f"{path}+{path}/x"} for path in paths]}
    text = yaml.safe_dump(recipe, default_style=style, allow_unicode=style is None, width=40)
    names = names_of(*paths)
    renamed = names.rename_yaml(f"# see {paths[0]}\n{text}")
    assert "alice" not in renamed
    models = [entry["model"] for entry in yaml.safe_load(renamed)["models"]]
    assert len(set(models)) == len(paths)
    assert not any(model.startswith("/") for model in models)
    assert yaml.safe_load(renamed) == names.apply(recipe)


def test_paths_below_the_recipe_are_relative_and_others_are_named_by_their_end() -> None:
    names = names_of(f"{SECRET}/here/models/a", "/x/one/model", "/x/two/model", "/y/b/", "~/c", "org/hub", "../rel")
    text = f"{SECRET}/here/models/a /x/one/model /x/two/model/config.json file:///y/b '/y/b/' ~/c org/hub ../rel"
    assert names.rename_text(text) == "models/a one/model two/model/config.json b 'b' c org/hub ../rel"
    assert names.rename_text("/x/one/models /y/bc") == "/x/one/models /y/bc"


INVISIBLE = [chr(code) for code in (0, 0x1B, 0x7F, 0x9B, 0x61C, 0x200E, 0x200F, 0xFEFF, 0xE0041)]
INVISIBLE += [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xD800, 0xDC80, 0xDFFF)]


@pytest.mark.parametrize("mark", INVISIBLE, ids=ascii)
def test_a_mark_in_a_name_is_shown_escaped_everywhere(mark: str) -> None:
    name, shown = f"../models/a{mark}b", f"../models/a{ascii(mark)[1:-1]}b"
    if not "\ud800" <= mark <= "\udfff":  # A recipe cannot contain one.
        assert names_of(name).rename_text(f"{name}: lost 2 points") == f"{shown}: lost 2 points"
        assert yaml.safe_load(names_of(name).rename_yaml(yaml.safe_dump({"model": name}))) == {"model": shown}
    assert escape(name) == shown.replace("\\", "\\\\")
    assert environment().from_string("{{ name }}").render(name=name) == shown
    console = FittingConsole(file=(out := io.StringIO()), width=80)
    for printed in (name, Text(name), Table(name)):
        console.print(printed)
    assert out.getvalue().count(shown) == 3


def test_a_name_is_never_that_of_another_model() -> None:
    assert names_of("/x/b", "b").rename_text("/x/b") == "x/b"


@pytest.mark.parametrize(
    "write",
    [
        str, lambda path: json.dumps({"a": path}),
        lambda path: json.dumps({"a": path}, ensure_ascii=False).replace("/", "\\/"),
        lambda path: f"file://{quote(path)}/x", lambda path: quote(path, safe=""),
        lambda path: html.escape(f"<{path}>"), lambda path: f"../../..{path}/model",
    ],
)  # fmt: skip
def test_the_scan_finds_a_path_however_it_is_written(write: object) -> None:
    content = f"text {write(SECRET)}\n"  # type: ignore[operator]  # every parametrized value is a function
    with pytest.raises(Refused) as refusal:
        require_no_private_paths([written_file("notes.txt", content)], [Path(SECRET)], "demo")
    assert refusal.value.where == "demo: notes.txt"
    assert "a path of this machine" in str(refusal.value.found)


def test_the_scan_reads_the_metadata_of_weights(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from mergegate.tasks.release.publish.content import ReleaseFile

    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1)}, file, metadata={"source": SECRET})
    with pytest.raises(Refused, match=r"model\.safetensors"):
        require_no_private_paths([ReleaseFile(file.name, 1, "", file)], [Path(SECRET)], "demo")


def test_words_that_only_look_like_a_directory_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root")
    ordinary = f'"/tmp", "/root", "/tmp/no-such-file-{"x" * 20}", "a/tmp/b", "/rooted", "{SECRET}-other"'
    require_no_private_paths([written_file("tokenizer.json", ordinary)], [Path(SECRET), Path("/")], "demo")


def test_a_file_that_exists_in_the_temporary_directory_is_a_path_of_this_machine() -> None:
    with tempfile.NamedTemporaryFile() as file, pytest.raises(Refused):
        require_no_private_paths([written_file("notes.txt", f"see {file.name}.")], [], "demo")
