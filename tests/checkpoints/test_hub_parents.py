"""Parents on the Hub are resolved to commits by small files and headers alone, without any weight."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import httpx
import pytest
from hub_family import RECIPE, go_offline, header_sizes, mergegate
from hub_look_alike import READER, WRITER, Fault, LookAlike

from mergegate.merge_core import load_recipe, open_checkpoint
from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.tasks.models.checkpoints import pin


def found_of(text: str = RECIPE) -> dict[str, pin.ResolvedCheckpoint]:
    return {parent.name: parent for parent in pin.resolve_parents(load_recipe(text))}


def problem(text: str) -> MergegateError:
    with pytest.raises(MergegateError) as caught:
        pin.resolve_parents(load_recipe(text))
    return caught.value


def linear(*models: str) -> str:
    listed = ", ".join(f"{{model: {model}, parameters: {{weight: 1}}}}" for model in models)
    return f"merge_method: linear\nmodels: [{listed}]\n"


def test_a_remote_checkpoint_equals_the_local_one_by_its_headers_alone(online: LookAlike, models: Path) -> None:
    for name, parent in found_of().items():
        remote, local = pin.open_parent(parent), open_checkpoint(models / name)
        assert remote.config == local.config
        shapes = [
            {key: (tensor.shape, tensor.dtype, tensor.offset, tensor.file.name) for key, tensor in one.tensors.items()}
            for one in (remote, local)
        ]
        assert shapes[0] == shapes[1]
    assert online.sent == header_sizes(models)


def test_a_plan_of_remote_files_is_the_plan_of_local_files(online: LookAlike, models: Path, tmp_path: Path) -> None:
    def plan(recipe: str) -> tuple[object, int]:
        (tmp_path / "recipe.yaml").write_text(recipe)
        arguments = ("plan", str(tmp_path / "recipe.yaml"), "--json", "--no-probe", "-o", str(tmp_path / "out"))
        answer = json.loads(mergegate(*arguments).stdout)
        return answer["needs"], answer["bytes_to_download"]

    needs, nothing = plan(RECIPE.replace("acme/", f"{models}/"))
    weights = sum(file.stat().st_size for file in models.glob("*/model*.safetensors"))
    assert nothing == 0
    assert plan(RECIPE) == plan(RECIPE) == (needs, weights)


def test_cards_and_licenses_are_downloaded_but_not_files_of_other_libraries(online: LookAlike, models: Path) -> None:
    (models / "base" / "LICENSE.txt").write_text("terms")
    (models / "base" / "additional_chat_templates").mkdir()
    (models / "base" / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    online.add_model("acme/base", models / "base")
    base = found_of()["base"]
    here = {path.relative_to(base.directory).as_posix() for path in base.directory.rglob("*") if path.is_file()}
    assert here == {
        *("README.md", "LICENSE.txt", "config.json", "tokenizer.json", "model.safetensors.index.json"),
        "additional_chat_templates/tools.jinja",
    }
    assert set(base.snapshot.missing()) == {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}


def test_a_branch_resolves_to_one_commit_in_all_recipes(online: LookAlike, models: Path) -> None:
    before = online.repositories["acme/math"].branches["main"]

    def move(request: object) -> None:
        if getattr(request, "path", "").endswith("/api/models/acme/math"):
            online.add_model("acme/math", models / "code")

    online.after.append(move)
    recipes = [load_recipe(RECIPE), load_recipe(RECIPE.replace("0.5", "0.7")), load_recipe(linear("acme/math"))]
    found = pin.resolve_all_parents(recipes)
    assert {parent.revision for parents in found for parent in parents if parent.name == "math"} == {before}
    assert online.repositories["acme/math"].branches["main"] != before


def test_files_of_a_commit_are_requested_once(online: LookAlike) -> None:
    found_of()
    online.log.clear()
    found_of()
    assert online.log
    assert not any("/resolve/" in entry.path for entry in online.log)


def test_offline_only_cached_commits_are_accepted_and_one_is_suggested_for_a_branch(
    online: LookAlike, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = found_of()["math"].revision
    go_offline(monkeypatch)
    error = problem(linear("acme/math"))
    assert isinstance(error, InvalidInput)
    assert "HF_HUB_OFFLINE forbids" in error.found
    assert f"acme/math@{commit}" in error.remedy
    uncached = problem(linear(f"acme/math@{'0' * 40}"))
    assert isinstance(uncached, InvalidInput)
    assert "nor complete in the Hub's cache" in uncached.found


def test_missing_headers_are_reported_offline(online: LookAlike, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = found_of(linear("acme/math"))["math"]
    go_offline(monkeypatch)
    with pytest.raises(InvalidInput, match="HF_HUB_OFFLINE"):
        pin.open_parent(parent)


def test_the_error_of_a_gated_repository_names_its_page(online: LookAlike, monkeypatch: pytest.MonkeyPatch) -> None:
    found_of()  # Access is revoked although small files are cached.
    online.repositories["acme/math"].gated = "manual"
    error = problem(RECIPE)
    assert isinstance(error, InvalidInput)  # The user named a repository without the token that it needs.
    assert error.where == "acme/math"
    assert error.found == "the repository is gated, and HF_TOKEN is not set"
    assert f"{online.url}/acme/math" in error.remedy
    assert "HF_TOKEN" in error.remedy
    monkeypatch.setenv("HF_TOKEN", READER)
    pin.open_parent(found_of()["math"])


def test_a_hub_without_auth_check_is_accepted(online: LookAlike) -> None:
    online.set_faults([Fault("fail", path="/auth-check", status=404, times=1000)])
    assert len(found_of()) == 3


def test_the_error_of_a_private_repository_asks_for_a_token(
    online: LookAlike, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    online.repositories["acme/math"].private = True
    error = problem(RECIPE)
    assert isinstance(error, InvalidInput)
    assert error.where == "acme/math"
    assert "export HF_TOKEN" in error.remedy
    commit = online.repositories["acme/math"].branches["main"]
    with monkeypatch.context() as patch:
        patch.setenv("HF_TOKEN", READER)
        assert found_of()["math"].revision == commit
    (tmp_path / "login").write_text(READER)  # A login on this machine is sufficient, too.
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "login"))
    assert found_of()["math"].revision == commit


def test_an_unknown_token_is_reported_once(online: LookAlike, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    error = problem(RECIPE)
    assert (error.where, error.exit_code) == ("HF_TOKEN", 2)
    assert f"{online.url}/settings/tokens" in error.remedy
    assert "also" not in error.found
    assert "hf_expired" not in str(error)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("acme/math@v7", "no such branch, tag or commit"),
        ("acme/maths", "neither a local directory nor a Hub repository"),
        ("acme/notes", "the repository has no config.json"),
    ],
)
def test_a_model_that_the_hub_does_not_have_is_reported(
    online: LookAlike, tmp_path: Path, model: str, found: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.json").write_text("{}")
    online.add_model("acme/notes", tmp_path / "empty")
    error = problem(linear(model))
    assert isinstance(error, InvalidInput)
    assert error.where == model
    assert found in error.found


def test_all_problems_of_parents_are_reported(online: LookAlike) -> None:
    online.repositories["acme/math"].gated = "auto"
    del online.repositories["acme/code"]
    recipe = load_recipe(RECIPE)
    search = pin.search_parents([recipe])
    assert [problem.where for problem in search.problems] == ["acme/math", "acme/code"]
    assert [parent.name for parent in search.parents[0]] == ["base"]
    with pytest.raises(MergegateError, match="also: acme/code"):
        pin.resolve_parents(recipe)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        *((Fault("fail", path="/api/models", status=status, times=1000), str(status)) for status in (429, 500, 503)),
        (Fault("drop", times=1000), "the Hub does not serve it: Server disconnected"),
        (None, "the Hub does not serve it"),
    ],
)
def test_a_failing_hub_is_refused(
    online: LookAlike, monkeypatch: pytest.MonkeyPatch, fault: Fault | None, found: str
) -> None:
    online.set_faults([fault] if fault else [])
    with socket.socket() as taken:  # A port without a listener.
        taken.bind(("127.0.0.1", 0))
        if fault is None:
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        error = problem(linear("acme/math"))
    assert isinstance(error, Refused)
    assert found in error.found
    assert "run again later" in error.remedy


def test_a_hub_that_serves_no_headers_is_refused(online: LookAlike) -> None:
    parent = found_of(linear("acme/math"))["math"]
    online.set_faults([Fault("fail", path="/resolve/", status=502, times=1000)])
    with pytest.raises(Refused, match="502"):
        pin.open_parent(parent)


def test_a_server_without_ranges_is_refused_before_it_sends_weights(
    online: LookAlike, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(response: httpx.Response) -> bytes:
        assert response.is_redirect
        return original(response)

    parent, original = found_of(linear("acme/math"))["math"], httpx.Response.read
    online.set_faults([Fault("fail", path="/_storage", status=200)])
    monkeypatch.setattr(httpx.Response, "read", read)
    with pytest.raises(InvalidInput, match="ranged read with status 200"):
        pin.open_parent(parent)


def test_remote_weights_that_are_shorter_than_their_header_declares_are_refused(
    online: LookAlike, models: Path
) -> None:
    file = models / "code" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    online.add_model("acme/code", models / "code")
    with pytest.raises(InvalidInput, match="truncated"):
        pin.open_parent(found_of()["code"])


def test_remote_pickled_weights_are_refused(online: LookAlike, models: Path) -> None:
    (models / "code" / "model.safetensors").rename(models / "code" / "pytorch_model.bin")
    commit = online.add_model("acme/code", models / "code").id
    with pytest.raises(Refused, match="weights are pickled") as caught:
        pin.open_parent(found_of()["code"])
    assert f"hf download acme/code --revision {commit}" in caught.value.remedy
    assert not online.sent


def test_a_remote_index_that_points_outside_is_refused(online: LookAlike, models: Path) -> None:
    index = models / "base" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "../math/model.safetensors"
    index.write_text(json.dumps(content))
    online.add_model("acme/base", models / "base")
    with pytest.raises(InvalidInput, match="inside the checkpoint") as caught:
        pin.open_parent(found_of()["base"])
    assert caught.value.where.startswith("acme/base@")


def test_the_token_is_sent_to_the_hub_and_not_to_storage(online: LookAlike, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", WRITER)
    for parent in found_of().values():
        pin.open_parent(parent)
    assert {entry.path.startswith("/_storage") for entry in online.log} == {True, False}
    assert all(entry.authorised != entry.path.startswith("/_storage") for entry in online.log)
