"""Reading a model's declared license and those of its ancestors, and the license stage that records them."""

from __future__ import annotations

import datetime
import hashlib
import json
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegate.tasks.base.store.manifest import stage_key
from mergegate.tasks.models.checkpoints.pin import ResolvedCheckpoint
from mergegate.tasks.preflight.licenses.check import LicenseVerdict, check_licenses, read_licenses
from mergegate.tasks.preflight.licenses.resolve import CardSource, NotRead, lineage, read_declaration, walk
from mergegate.tasks.preflight.licenses.rules import Unread
from mergegate.tasks.preflight.licenses.table import load_table
from mergegate.tasks.preflight.settings import LicenseSettings

TABLE = load_table()


def _model(directory: Path, card: str | None = None, **fields: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    if card is None:
        card = f"---\n{yaml.safe_dump(fields)}---\n# A model\n"
    (directory / "README.md").write_text(card, encoding="utf-8")
    return directory


def _nowhere(entry: str, descendant: CardSource) -> CardSource | NotRead:
    return NotRead("nowhere")


def test_the_card_fields_and_the_license_file_are_read(tmp_path: Path) -> None:
    fields = {"license": "other", "license_name": "qwen", "license_link": "LICENSE", "base_model": ["qwen/base"]}
    model = _model(tmp_path / "chat", **fields)
    (model / "LICENSE").write_bytes(b"Qwen terms\n")
    found = read_declaration(CardSource(model))
    assert (found.name, found.license, found.license_name) == ("chat", ("other",), "qwen")
    assert (found.license_link, found.base_model) == ("LICENSE", ("qwen/base",))
    assert (found.license_file, found.license_sha256) == ("LICENSE", hashlib.sha256(b"Qwen terms\n").hexdigest())
    assert found.problems == ()


@pytest.mark.parametrize("name", ["LICENSE", "LICENSE.md", "license.txt", "LICENCE", "COPYING"])
def test_a_license_file_is_found_under_its_usual_names(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("terms")
    (tmp_path / "LICENSES").mkdir()
    assert read_declaration(CardSource(tmp_path)).license_file == name


@pytest.mark.parametrize(
    ("card", "license", "problem"),
    [
        ("---\nlicense: mit\n---\n", ("mit",), None), ("---\r\nlicense: mit\r\n---\r\n# T\r\n", ("mit",), None),
        ("\ufeff---\nlicense: mit\n---\n", ("mit",), None), ("---\nlicense: mit\n---", ("mit",), None),
        ("---\nlicense: [mit, apache-2.0]\n---\n", ("mit", "apache-2.0"), None),
        ("---\nlicense: ' mit '\n---\n# a\n---\nlicense: gpl\n---\n", ("mit",), None),
        ("---\ntags: [a]\n---\n", (), None), ("---\nlicense:\n---\n", (), None), ("---\nlicense: ''\n---\n", (), None),
        ("---\nlicense: []\n---\n", (), None), ("---\nlicense: 2.0\n---\n", (), "license is a float"),
        ("---\nlicense: no\n---\n", (), "license is a bool"),
        ("---\nlicense: {name: mit}\n---\n", (), "license is a dict"), ("---\nlicense: [mit, 3]\n---\n", (), "int"),
        ("---\nlicense: [mit, null]\n---\n", (), "NoneType"), ("---\nlicense: [[mit]]\n---\n", (), "list"),
        ("---\nlicense: 2024-01-02\n---\n", ("2024-01-02",), None),
        ("---\nlicense: !!timestamp 2024-01-02\n---\n", (), "not valid YAML"),
        ("---\n- license\n---\n", (), "is a list, not a mapping"), ("---\n---\n", (), "cannot be read as front matter"),
        ("---\nlicense: [mit\n---\n", (), "not valid YAML"),
        ("---\nlicense: !!python/object/apply:os.getcwd []\n---\n", (), "not valid YAML"),
        ("---\ndate: 2024-13-45\nlicense: mit\n---\n", ("mit",), None),
        ("---\nlicense: mit\nlicense: gpl\n---\n", (), "appears twice"),
        ("---\nlicense: !!int ''\n---\n", (), "not valid YAML"),
        ("---\na: " + "[" * 1500 + "\n---\n", (), "not valid YAML"),
        ("---\nlicense: mit\nnote: '\udcff\udcfe'\n---\n", ("mit",), None),
        ("---\nlicense: mit\n", (), "cannot be read as front matter"), ("license: mit\n", (), "no front matter"),
        ("", (), "no front matter"),
    ],
)  # fmt: skip
def test_an_unintelligible_card_declares_nothing_and_reports_why(
    tmp_path: Path, card: str, license: tuple[str, ...], problem: str | None
) -> None:
    (tmp_path / "README.md").write_bytes(card.encode(errors="surrogateescape"))
    found = read_declaration(CardSource(tmp_path))
    assert found.license == license
    assert bool(found.problems) == (problem is not None)
    assert problem is None or problem in found.problems[0]


def test_a_card_that_expands_to_a_huge_value_is_cheap(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]
    (tmp_path / "README.md").write_text("---\n" + "\n".join(lines) + "\nlicense: *a39\n---\n")
    found = read_declaration(CardSource(tmp_path))
    assert found.license == ()
    assert len(found.problems[0]) < 100


@pytest.mark.parametrize("missing", [True, False])
def test_a_missing_card_or_directory_declares_nothing(tmp_path: Path, missing: bool) -> None:
    directory = tmp_path / "gone" if missing else tmp_path
    found = read_declaration(CardSource(directory), "acme/chat")
    assert (found.name, found.license, found.problems) == ("acme/chat", (), ("there is no README.md",))


def test_a_readme_that_is_a_directory_declares_nothing(tmp_path: Path) -> None:
    (tmp_path / "README.md").mkdir()
    assert "cannot be read" in read_declaration(CardSource(tmp_path)).problems[0]


TEXT = st.text(alphabet="aé-/.: \n\0", max_size=8)
SCALARS = st.sampled_from([None, True, 0, 3, 1.5, float("nan"), b"\xff", datetime.date(2024, 1, 2)]) | TEXT
LISTS = st.lists(SCALARS | st.lists(SCALARS, max_size=2), max_size=3)
VALUES = SCALARS | LISTS | st.dictionaries(TEXT, SCALARS, max_size=2)
FIELDS = dict.fromkeys(("license", "license_name", "license_link", "base_model"), VALUES)


@settings(max_examples=40)
@given(fields=st.fixed_dictionaries({}, optional=FIELDS))
def test_any_type_of_a_field_is_read_without_error(fields: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = _model(Path(directory), f"---\n{yaml.safe_dump(fields)}---\n")
        (parent, *_) = lineage(CardSource(model), _nowhere, TABLE).models
        one = fields.get("license")
        # A value that YAML 1.1 reads as a date is text here, as in JSON.
        named = isinstance(fields.get("license_name"), str | datetime.date)
        if not isinstance(one, str | list | datetime.date) and not named:
            assert parent.license.id == "unknown"


@settings(max_examples=40)
@given(card=st.text(alphabet="-\n\r :[]{}&*!|>'\"#license%mt0", max_size=80))
def test_any_card_is_read_without_error(card: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "README.md").write_bytes(b"---\n" + card.encode() + b"\n---\n")
        assert isinstance(walk(CardSource(Path(directory)), _nowhere), tuple)


def test_ancestors_are_found_next_to_the_model_and_by_the_callback(tmp_path: Path) -> None:
    _model(tmp_path / "hub" / "meta" / "llama", license="llama3.1")
    _model(tmp_path / "tune", license="apache-2.0", base_model="meta/llama")
    chat = _model(tmp_path / "chat", license="mit", base_model=["../tune", "acme/gone"])
    asked = []

    def find(entry: str, descendant: CardSource) -> CardSource | NotRead:
        asked.append((entry, descendant.directory.name))
        return CardSource(tmp_path / "hub" / entry) if entry == "meta/llama" else NotRead("not there")

    found = walk(CardSource(chat), find, "acme/chat")
    assert set(asked) == {("meta/llama", "tune"), ("acme/gone", "chat")}
    assert [declaration.name for declaration in found] == ["acme/chat", "../tune", "meta/llama"]
    assert [declaration.license for declaration in found] == [("mit",), ("apache-2.0",), ("llama3.1",)]
    assert found[0].unread == (Unread(name="acme/gone", why="not there"),)


def test_cycles_end_and_diamonds_are_read_once(tmp_path: Path) -> None:
    _model(tmp_path / "a", license="mit", base_model=["../b", "../c", "../a"])
    _model(tmp_path / "b", license="mit", base_model="../d")
    _model(tmp_path / "c", license="mit", base_model="../d")
    _model(tmp_path / "d", license="gemma", base_model=["../a", "."])
    names = [declaration.name for declaration in walk(CardSource(tmp_path / "a"), _nowhere)]
    assert names == ["a", "../b", "../c", "../d"]
    top, *_ = lineage(CardSource(tmp_path / "a"), _nowhere, TABLE).models
    assert [ancestor.name for ancestor in top.ancestors] == ["../b", "../c", "../d"]


def test_many_diamonds_in_a_row_are_read_once_each(tmp_path: Path) -> None:
    for level in range(25):
        above = [f"../l{level + 1}", f"../r{level + 1}"]
        for side in "lr":
            _model(tmp_path / f"{side}{level}", license="mit", base_model=above)
    assert len(lineage(CardSource(tmp_path / "l0"), _nowhere, TABLE).models) == 1 + 2 * 24


@pytest.mark.parametrize("entry", ["a\0b", "x" * 5000, "/etc", "acme/model@main"])
def test_an_entry_that_no_directory_can_have_is_unread(tmp_path: Path, entry: str) -> None:
    (found,) = walk(CardSource(_model(tmp_path, license="mit", base_model=entry)), _nowhere)
    assert [unread.why for unread in found.unread] == ["nowhere"]


def test_the_lineage_contains_each_model_with_its_ancestors(tmp_path: Path) -> None:
    _model(tmp_path / "base", license="other", license_name="Tongyi Qianwen")
    _model(tmp_path / "tune", license="apache-2.0", base_model="../base")
    chat = _model(tmp_path / "chat", license=["mit", "gpl-3.0"], base_model="../tune")
    top, tune, base = lineage(CardSource(chat), _nowhere, TABLE, "acme/chat").models
    assert (top.name, top.license.id, top.declared) == ("acme/chat", "unknown", "license: mit / gpl-3.0")
    assert [ancestor.license.id for ancestor in top.ancestors] == ["apache-2.0", "tongyi-qianwen"]
    assert [ancestor.license.id for ancestor in tune.ancestors] == ["tongyi-qianwen"]
    assert (base.license.id, base.ancestors) == ("tongyi-qianwen", ())


def test_quoted_card_text_and_ancestor_names_are_short_and_printable(tmp_path: Path) -> None:
    long = "\x1b[31m" + "x" * 500
    model = _model(tmp_path / "chat", license="other", license_name=long, base_model=f"acme/{long}")
    (top,) = lineage(CardSource(model), _nowhere, TABLE).models
    for quoted, limit in ((read_declaration(CardSource(model)).words, 150), (top.unread[0].name, 100)):
        assert quoted.isprintable()
        assert len(quoted) < limit


def _config(directory: Path, **fields: object) -> None:
    (directory / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("called", ["base-135M", "Base-135m", "acme--base-135M", "acme_base-135M"])
def test_a_neighboring_base_is_found_by_its_name(tmp_path: Path, called: str) -> None:
    model = _model(tmp_path / "chat", base_model="acme/base-135M")
    _model(tmp_path / called, license="mit")
    _, base = walk(CardSource(model), _nowhere)
    assert (base.name, base.license) == ("acme/base-135M", ("mit",))


def test_a_neighboring_base_is_found_by_the_name_in_its_config(tmp_path: Path) -> None:
    model = _model(tmp_path / "chat", base_model="acme/base")
    _config(_model(tmp_path / "downloaded", license="mit"), _name_or_path="acme/base")
    # A fine-tune of the base has the same name in its config, and its card names the base model.
    _config(_model(tmp_path / "tuned", license="gpl-3.0", base_model="acme/base"), _name_or_path="acme/base")
    assert [found.license for found in walk(CardSource(model), _nowhere)] == [(), ("mit",)]


def test_what_lies_beside_a_model_and_says_no_license_is_looked_for_elsewhere(tmp_path: Path) -> None:
    model = _model(tmp_path / "chat", base_model="acme/base")
    (tmp_path / "base").mkdir()
    (found,) = walk(CardSource(model), _nowhere)
    assert found.unread == (Unread(name="acme/base", why="nowhere"),)


def test_an_ambiguous_neighbor_is_not_used(tmp_path: Path) -> None:
    model = _model(tmp_path / "chat", base_model="acme/base")
    for called in ("base", "acme--base"):
        _model(tmp_path / called, license="mit")
    assert len(walk(CardSource(model), _nowhere)) == 1


# ---------------------------------------------------------------- the stage


def _checkpoint(place: Path, card: str, **files: str) -> ResolvedCheckpoint:
    _model(place, f"---\n{card}\n---\n")
    for name, text in files.items():
        (place / name).write_text(text)
    return ResolvedCheckpoint(name=place.name, ref=f"../{place.name}", directory=place)


def _verdict(*parents: ResolvedCheckpoint, name: str = "mix", accepted: dict[str, str] | None = None) -> LicenseVerdict:
    settings = LicenseSettings(accepted=accepted or {})
    return check_licenses.work(read_licenses(parents, TABLE), settings.use(name), TABLE, settings.accepted)


def _key(*parents: ResolvedCheckpoint) -> str:
    return stage_key("licenses", check_licenses.version, {"declared": read_licenses(parents, TABLE)})


def test_the_verdict_records_acceptances_with_user_and_reason(tmp_path: Path) -> None:
    accepted = {"llama3.2": "alice: text-only model", "gone/base": "bob: it is MIT, seen on 1 May"}
    accepted["mit"] = "eve: unused"
    chat = _checkpoint(tmp_path / "chat", "license: llama3.2\nbase_model: gone/base")
    verdict = _verdict(chat, name="acme/Llama-mix", accepted=accepted)
    assert verdict.refusal() is None
    assert verdict.combination.acceptances == (
        "gone/base: bob: it is MIT, seen on 1 May",
        "llama3.2: alice: text-only model",
    )
    assert type(verdict).model_validate_json(verdict.model_dump_json()) == verdict


def test_an_ancestor_that_is_a_parent_has_the_name_of_the_parent(tmp_path: Path) -> None:
    base = _checkpoint(tmp_path / "base", "license: cc-by-4.0")
    chat = _checkpoint(tmp_path / "chat", "license: cc-by-4.0\nbase_model: ../base")
    verdict = _verdict(base, chat)
    assert verdict.ancestors == ()
    notices = [item.text for item in verdict.combination.obligations if item.kind == "notice"]
    assert notices == ["Made with base and chat, licensed under CC-BY-4.0."]


def test_an_ancestor_beside_a_parent_is_recorded_with_its_license_file(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "base", "license: other", LICENSE="Our own terms.")
    chat = _checkpoint(tmp_path / "chat", "license: mit\nbase_model: ../base")
    verdict = _verdict(chat)
    (ancestor,) = verdict.ancestors
    assert (ancestor.name, ancestor.license, ancestor.revision) == ("../base", "other", None)
    assert ancestor.own_text == "Our own terms."
    assert list(verdict.licenses) == ["chat"]


def test_a_refusal_names_all_reviews_and_what_to_accept(tmp_path: Path) -> None:
    chat = _checkpoint(tmp_path / "chat", "license: mit\nbase_model: gone/base")
    verdict = _verdict(chat)
    refusal = str(verdict.refusal())
    assert "chat was derived from gone/base, whose license could not be read (HF_HUB_OFFLINE is set)" in refusal
    assert "'gone/base' under 'accepted'" in refusal


def test_the_key_depends_on_declarations_and_not_on_paths(tmp_path: Path) -> None:
    one = _checkpoint(tmp_path / "a" / "chat", "license: mit", LICENSE="terms")
    same = _checkpoint(tmp_path / "b" / "chat", "license: mit", LICENSE="terms")
    other_file = _checkpoint(tmp_path / "c" / "chat", "license: mit", LICENSE="other terms")
    other_card = _checkpoint(tmp_path / "d" / "chat", "license: apache-2.0", LICENSE="terms")
    assert _key(one) == _key(same)
    assert len({_key(one), _key(other_file), _key(other_card)}) == 3


def test_checkpoints_without_cards_have_the_card_and_the_license_file_of_their_run(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "base", "license: apache-2.0")
    _checkpoint(tmp_path / "run", "license: other\nlicense_name: acme\nbase_model: ../base", LICENSE="Our own terms.")
    saved = []
    for name in ("checkpoint-10", "final", "logs"):
        (tmp_path / "run" / name).mkdir()
        saved.append(ResolvedCheckpoint(name=name, ref=name, directory=tmp_path / "run" / name))
    (tmp_path / "run" / "final" / "trainer_state.json").write_text("{}")
    own = _checkpoint(tmp_path / "run" / "checkpoint-20", "license: mit")
    generated = "library_name: peft\nbase_model: ../../start"  # as PEFT writes it to each checkpoint of an adapter
    by_peft = _checkpoint(tmp_path / "run" / "checkpoint-30", generated)
    families = read_licenses([*saved, own, by_peft], TABLE).families
    assert families["checkpoint-30"][0].own_file is not None
    assert [each.name for each in families["checkpoint-30"][0].unread] == ["../../start"]
    for name in ("checkpoint-10", "final"):
        checkpoint, base = families[name]
        assert (checkpoint.declared, base.license.id) == (families["checkpoint-10"][0].declared, "apache-2.0")
        assert checkpoint.own_file is not None
    assert families["logs"][0].declared == "there is no README.md"  # not a checkpoint of a run
    assert families["checkpoint-20"][0].license.id == "mit"
