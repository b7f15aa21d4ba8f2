"""The license stage: its record of parents, ancestors and acceptances, and its refusals."""

from __future__ import annotations

from pathlib import Path

from mergegate.tasks.checkpoints.pin import ResolvedCheckpoint
from mergegate.tasks.preflight.licenses.check import check_licenses, read_licenses
from mergegate.tasks.preflight.licenses.settings import LicenseSettings
from mergegate.tasks.preflight.licenses.table import load_table
from mergegate.tasks.store.keys import stage_key

TABLE = load_table()


def _model(place: Path, card: str, **files: str) -> ResolvedCheckpoint:
    place.mkdir(parents=True, exist_ok=True)
    (place / "README.md").write_text(f"---\n{card}\n---\n")
    for name, text in files.items():
        (place / name).write_text(text)
    return ResolvedCheckpoint(name=place.name, ref=f"../{place.name}", directory=place)


def _key(*parents: ResolvedCheckpoint) -> str:
    return stage_key("licenses", check_licenses.version, {"declared": read_licenses(parents, TABLE)})


def test_the_verdict_records_acceptances_with_user_and_reason(tmp_path: Path) -> None:
    accepted = {
        "llama3.2": "alice: text-only model",
        "gone/base": "bob: it is MIT, seen on 1 May",
        "mit": "eve: unused",
    }
    settings = LicenseSettings(accepted=accepted)
    chat = _model(tmp_path / "chat", "license: llama3.2\nbase_model: gone/base")
    verdict = check_licenses.work(read_licenses([chat], TABLE), settings.use("acme/Llama-mix"), TABLE, accepted)
    assert verdict.refusal() is None
    assert verdict.combination.acceptances == (
        "gone/base: bob: it is MIT, seen on 1 May",
        "llama3.2: alice: text-only model",
    )
    assert type(verdict).model_validate_json(verdict.model_dump_json()) == verdict


def test_an_ancestor_that_is_a_parent_has_the_name_of_the_parent(tmp_path: Path) -> None:
    base = _model(tmp_path / "base", "license: cc-by-4.0")
    chat = _model(tmp_path / "chat", "license: cc-by-4.0\nbase_model: ../base")
    verdict = check_licenses.work(read_licenses([base, chat], TABLE), LicenseSettings().use("mix"), TABLE, {})
    assert verdict.ancestors == ()
    notices = [item.text for item in verdict.combination.obligations if item.kind == "notice"]
    assert notices == ["Made with base and chat, licensed under CC-BY-4.0."]


def test_an_ancestor_beside_a_parent_is_recorded_with_its_license_file(tmp_path: Path) -> None:
    _model(tmp_path / "base", "license: other", LICENSE="Our own terms.")
    chat = _model(tmp_path / "chat", "license: mit\nbase_model: ../base")
    verdict = check_licenses.work(read_licenses([chat], TABLE), LicenseSettings().use("mix"), TABLE, {})
    (ancestor,) = verdict.ancestors
    assert (ancestor.name, ancestor.license, ancestor.revision) == ("../base", "other", None)
    assert ancestor.own_text == "Our own terms."
    assert list(verdict.licenses) == ["chat"]


def test_a_refusal_names_all_reviews_and_what_to_accept(tmp_path: Path) -> None:
    chat = _model(tmp_path / "chat", "license: mit\nbase_model: gone/base")
    verdict = check_licenses.work(read_licenses([chat], TABLE), LicenseSettings().use("mix"), TABLE, {})
    refusal = verdict.refusal()
    assert refusal is not None
    assert "chat was derived from gone/base, whose license could not be read (HF_HUB_OFFLINE is set)" in str(refusal)
    assert "'gone/base' under 'accepted'" in str(refusal)


def test_the_key_depends_on_declarations_and_not_on_paths(tmp_path: Path) -> None:
    one = _model(tmp_path / "a" / "chat", "license: mit", LICENSE="terms")
    same = _model(tmp_path / "b" / "chat", "license: mit", LICENSE="terms")
    other_file = _model(tmp_path / "c" / "chat", "license: mit", LICENSE="other terms")
    other_card = _model(tmp_path / "d" / "chat", "license: apache-2.0", LICENSE="terms")
    assert _key(one) == _key(same)
    assert len({_key(one), _key(other_file), _key(other_card)}) == 3


def test_checkpoints_without_cards_have_the_card_and_the_license_file_of_their_run(tmp_path: Path) -> None:
    _model(tmp_path / "base", "license: apache-2.0")
    _model(tmp_path / "run", "license: other\nlicense_name: acme\nbase_model: ../base", LICENSE="Our own terms.")
    saved = []
    for name in ("checkpoint-10", "final", "logs"):
        (tmp_path / "run" / name).mkdir()
        saved.append(ResolvedCheckpoint(name=name, ref=name, directory=tmp_path / "run" / name))
    (tmp_path / "run" / "final" / "trainer_state.json").write_text("{}")
    own = _model(tmp_path / "run" / "checkpoint-20", "license: mit")
    families = read_licenses([*saved, own], TABLE).families
    for name in ("checkpoint-10", "final"):
        checkpoint, base = families[name]
        assert (checkpoint.declared, base.license.id) == (families["checkpoint-10"][0].declared, "apache-2.0")
        assert checkpoint.own_file is not None
    assert families["logs"][0].declared == "there is no README.md"  # not a checkpoint of a run
    assert families["checkpoint-20"][0].license.id == "mit"
