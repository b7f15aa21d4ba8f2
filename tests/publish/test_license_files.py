"""Test the license files of a release, and the obligations left to the publisher."""

from __future__ import annotations

from pathlib import Path

import pytest
from release_samples import license_verdict, parents

from mergegate.tasks.models.checkpoints.pin import PinnedCheckpoint, ResolvedCheckpoint
from mergegate.tasks.preflight.licenses.check import LicenseVerdict, check_licenses, read_licenses
from mergegate.tasks.preflight.licenses.table import load_table
from mergegate.tasks.preflight.settings import LicenseSettings
from mergegate.tasks.release.publish.documents.license_files import license_files, open_obligations

TABLE = load_table()
TEXTS = Path(__file__).resolve().parents[2] / "tasks" / "preflight" / "licenses" / "texts"


def _text(identifier: str) -> str:
    return (TEXTS / f"{identifier}.txt").read_text(encoding="utf-8")


def _model(place: Path, card: str, **files: str) -> PinnedCheckpoint:
    place.mkdir(parents=True, exist_ok=True)
    (place / "README.md").write_text(f"---\n{card}\n---\n")
    for name, text in files.items():
        (place / name).write_text(text)
    return PinnedCheckpoint(name=place.name, ref=f"models/{place.name}", directory=place, digest="d" * 64)


def _judge(*models: PinnedCheckpoint, accept: tuple[str, ...] = ()) -> LicenseVerdict:
    found = [ResolvedCheckpoint(name=one.name, ref=one.ref, directory=one.directory) for one in models]
    accepted = dict.fromkeys(accept, "alice: has read it")
    use = LicenseSettings(accepted=accepted).use("acme/Llama-mix")
    verdict = check_licenses.work(read_licenses(found, TABLE), use, TABLE, accepted)
    assert verdict.combination.status == "allowed", verdict.combination.reasons
    return verdict


def _files(models: tuple[PinnedCheckpoint, ...], verdict: LicenseVerdict | None = None) -> dict[str, str]:
    files = license_files(models, verdict or _judge(*models))
    assert len({file.name for file in files}) == len(files)
    texts = {file.name: file.source.decode() for file in files if isinstance(file.source, bytes)}
    assert len(texts) == len(files)
    return texts


def test_the_license_of_the_release_is_its_license_file(tmp_path: Path) -> None:
    models = (_model(tmp_path / "a", "license: apache-2.0"), _model(tmp_path / "b", "license: mit"))
    verdict = _judge(*models)
    files = _files(models, verdict)
    assert files["LICENSE"] == files["licenses/apache-2.0.txt"] == _text("apache-2.0")
    assert files["licenses/mit.txt"] == _text("mit")
    assert set(files) == {"LICENSE", "MODIFICATIONS", "licenses/apache-2.0.txt", "licenses/mit.txt"}
    assert open_obligations(models, verdict) == ()


def test_the_file_beside_a_parent_says_whose_copyright_it_is(tmp_path: Path) -> None:
    own = f"MIT License\n\nCopyright (c) 2024 Acme\n\n{_text('mit')}"
    models = (_model(tmp_path / "a", "license: mit", LICENSE=own),)
    files = _files(models)
    assert files["LICENSE"] == files["licenses/a.txt"] == own
    assert files["licenses/mit.txt"] == _text("mit")


def test_of_parents_with_different_copyrights_none_stands_for_all(tmp_path: Path) -> None:
    models = tuple(
        _model(tmp_path / name, "license: mit", LICENSE=f"Copyright (c) 2024 {name}\n\n{_text('mit')}") for name in "ab"
    )
    files = _files(models)
    assert files["LICENSE"] == _text("mit")
    assert "2024 a" in files["licenses/a.txt"]
    assert "2024 b" in files["licenses/b.txt"]


def test_several_licenses_stand_one_after_another_under_headings(tmp_path: Path) -> None:
    models = (_model(tmp_path / "a", "license: llama3.1"), _model(tmp_path / "b", "license: llama3.3"))
    verdict = _judge(*models)
    assert verdict.combination.card["license_name"] == "llama3.1-and-llama3.3"
    text = _files(models, verdict)["LICENSE"]
    first, second = text.index("\nllama3.1\n"), text.index("\nllama3.3\n")
    assert first < text.index(_text("llama3.1").strip()) < second < text.index(_text("llama3.3").strip())


def test_notices_stand_word_for_word_and_those_of_the_parents_are_kept(tmp_path: Path) -> None:
    models = (
        _model(tmp_path / "a", "license: llama3.1"),
        _model(tmp_path / "b", "license: apache-2.0", NOTICE="Acme Model\nCopyright 2024 Acme\n"),
    )
    notice = _files(models)["NOTICE"]
    assert notice.splitlines()[0] == (
        "Llama 3.1 is licensed under the Llama 3.1 Community License, "
        "Copyright © Meta Platforms, Inc. All Rights Reserved."
    )
    assert "Notice of b:\n\nAcme Model\nCopyright 2024 Acme\n" in notice


@pytest.mark.parametrize(("license", "stated"), [("apache-2.0", True), ("mit", False)])
def test_that_files_were_changed_is_stated_where_a_license_asks(tmp_path: Path, license: str, stated: bool) -> None:
    models = (_model(tmp_path / "a\n\n# b\u2028", f"license: {license}"),)
    files = _files(models)
    assert ("MODIFICATIONS" in files) == stated
    assert not stated or "  models/a # b" in files["MODIFICATIONS"].splitlines()


def test_a_license_that_stands_on_another_brings_both_texts(tmp_path: Path) -> None:
    models = (_model(tmp_path / "a", "license: lgpl-3.0"),)
    files = _files(models)
    assert files["licenses/gpl-3.0.txt"] == _text("gpl-3.0")
    assert _text("lgpl-3.0").strip() in files["LICENSE"]
    assert _text("gpl-3.0").strip() in files["LICENSE"]


def test_the_file_of_an_ancestor_travels_under_its_name(tmp_path: Path) -> None:
    _model(tmp_path / "base", "license: gemma", LICENSE=_text("gemma"))
    models = (_model(tmp_path / "a", "license: gemma\nbase_model: ../base"),)
    files = _files(models)
    assert files["licenses/base.txt"] == _text("gemma")


def test_an_unknown_license_is_shipped_as_it_lies_beside_its_model(tmp_path: Path) -> None:
    models = (_model(tmp_path / "a", "license: other\nlicense_name: acme", LICENSE="Acme terms."),)
    verdict = _judge(*models, accept=("a",))
    files = _files(models, verdict)
    assert files["LICENSE"] == files["licenses/a.txt"] == "Acme terms."
    assert open_obligations(models, verdict) == ()


def test_a_text_that_is_nowhere_is_an_open_obligation(tmp_path: Path) -> None:
    models = (_model(tmp_path / "a", "license: jamba-open-model-license"), _model(tmp_path / "b", "license: unknown"))
    verdict = _judge(*models, accept=("jamba-open-model-license", "b"))
    assert "LICENSE" not in _files(models, verdict)
    assert [(item.kind, item.text, item.model) for item in open_obligations(models, verdict)] == [
        ("text", "ship the license file that comes with b", "b"),
        ("text", "ship the text of jamba-open-model-license", None),
    ]
    (models[0].directory / "LICENSE").write_text("Jamba terms.")
    assert [item.model for item in open_obligations(models, verdict)] == ["b"]


def test_names_of_models_become_plain_file_names_that_do_not_collide(tmp_path: Path) -> None:
    mit = _model(tmp_path / "mit", "license: mit", LICENSE="Copyright (c) 2024 Acme\n\n" + _text("mit"))
    odd = _model(tmp_path / "odd", "license: mit", LICENSE="Copyright (c) 2023 Odd\n\n" + _text("mit"))
    odd = odd.model_copy(update={"name": "../acme/ö d@v1"})
    files = _files((mit, odd))
    assert files["licenses/mit.txt"] == _text("mit")
    assert "2024 Acme" in files["licenses/mit--LICENSE.txt"]
    assert "2023 Odd" in files["licenses/acme--d--v1.txt"]


def test_the_same_release_gives_the_same_files(tmp_path: Path) -> None:
    verdict = license_verdict("apache-2.0", "mit")
    one, two = (license_files(parents(tmp_path / name), verdict) for name in ("one", "two"))
    assert one == two
