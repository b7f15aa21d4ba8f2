"""The input boundary: any bytes give a value or InvalidInput, only plain files are read, in linear time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from honest import CONFIG, RECIPE, TASK, checkpoint, pickled, torch_zip
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegate.merge_core import load_recipe, open_checkpoint, parsing, plan_merge
from mergegate.merge_core.checkpoint.pickled_file import read_pickled
from mergegate.merge_core.checkpoint.vocabulary import Vocabulary, vocabulary_differences
from mergegate.merge_core.engine.engine import write_companions
from mergegate.merge_core.errors import InvalidInput, to_printable
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing.yaml_text import MAX_YAML_BYTES
from mergegate.tasks.preflight.compatibility import custom_code_findings
from mergegate.tasks.quality.evaluation.definitions.task import pin_task

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=40)
@given(value=PLAIN)
def test_what_json_and_yaml_can_say_is_read_as_it_is(value: object) -> None:
    assert parsing.parse_json(json.dumps(value).encode(), "x") == value
    assert parsing.parse_yaml(yaml.safe_dump(value), "x") == ([] if value is None else [value])


@pytest.mark.parametrize("parse", [parsing.parse_json, parsing.parse_yaml])
@settings(max_examples=50)
@given(data=st.data())
def test_any_bytes_are_a_value_or_invalid(parse: Any, data: st.DataObject) -> None:
    json_text = st.text(alphabet='[]{}",:\\ud80ntrue-1.e5 ', max_size=60).map(str.encode)
    yaml_text = st.text(alphabet="[]{}\",:&*<!|>-?'#%@\\0xuiond1.e5 \n\t\ud800", max_size=60)
    content = data.draw(st.binary(max_size=60) | json_text if parse is parsing.parse_json else yaml_text)
    try:
        json.dumps(parse(content, "x"), ensure_ascii=False).encode()
    except InvalidInput as error:
        require_printable(error)


def require_printable(error: InvalidInput) -> None:
    assert str(error).replace("\n", "").isprintable()


def test_only_brackets_outside_texts_nest() -> None:
    assert parsing.parse_json(b'["' + b"[" * 200 + b'", ' + b"[" * 63 + b"]" * 63 + b"]", "x")
    with pytest.raises(InvalidInput, match="200 levels"):
        parsing.parse_json(b"[" * 200 + b"]" * 200, "x")


def test_bounds_are_counted_before_anything_is_made() -> None:
    with pytest.raises(InvalidInput, match="up to 11 values"):
        parsing.parse_json(b"[1,2,3,4,5,6,7,8,9,0,1]", "x", bounds=parsing.JsonBounds(values=10))
    with pytest.raises(InvalidInput, match="23 bytes"):
        parsing.parse_json(b"[1,2,3,4,5,6,7,8,9,0,1]", "x", bounds=parsing.JsonBounds(size=22))


def test_a_date_is_its_text_and_an_alias_is_good_for_a_few_values_and_not_for_a_million() -> None:
    assert parsing.parse_yaml("a: 2024-01-02\nb: 2024-13-45", "x") == [{"a": "2024-01-02", "b": "2024-13-45"}]
    assert parsing.parse_yaml("a: &a [1, 2]\nb: [*a, *a]", "x") == [{"a": [1, 2], "b": [[1, 2], [1, 2]]}]
    with pytest.raises(InvalidInput, match="its aliases expand to"):
        parsing.parse_yaml("a: &a " + "x" * 50_000 + "\nb: [" + "*a, " * 1000 + "]", "x")


@pytest.mark.story
def test_many_plain_values_are_read_and_a_text_over_the_limit_is_refused_by_its_size() -> None:
    values = "a: &a [" + "1," * 200_000 + "1]"
    assert len(parsing.parse_yaml(values, "x")[0]["a"]) == 200_001
    with pytest.raises(InvalidInput, match="its aliases expand to"):
        parsing.parse_yaml(values + "\nb: *a", "x")
    with pytest.raises(InvalidInput, match="600005 characters"):
        parsing.parse_yaml("a: [" + "1," * 300_000 + "]", "x")


def test_all_keys_that_are_not_accepted_are_in_one_answer() -> None:
    text = "a: 1\na: 2\n1: x\nb: {c: 1, c: 2}\nd: " + "9" * 50
    with pytest.raises(InvalidInput) as caught:
        parsing.parse_yaml(text, "x")
    lines = str(caught.value).splitlines()
    assert lines[0] == "x: 4 problems"
    assert [line.partition(":")[0].strip() for line in lines[1:]] == [
        f"line {line}, column {column}" for line, column in ((2, 1), (3, 1), (4, 11), (5, 4))
    ]


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 4000))
def test_only_what_aliases_add_is_counted(values: int, aliases: int, length: int) -> None:
    """Only the total size that aliases add counts, not the size of the text."""
    anchor = "[" + ", ".join(["x" * length] * values) + "]"
    text = f"a: &a {anchor}\nb: [{', '.join(['*a'] * aliases)}]\nc: {'y' * 100_000}"
    added = aliases * (16 + values * (16 + length))
    if len(text) > MAX_YAML_BYTES:
        return
    if added > 2 << 20:
        with pytest.raises(InvalidInput, match="aliases"):
            parsing.parse_yaml(text, "x")
    else:
        assert len(parsing.parse_yaml(text, "x")[0]["b"]) == aliases


@pytest.mark.parametrize("words", ["\x1b[2J", "\ud800", "\0", "x" * 10_000, "\u202e"])
def test_messages_are_printable_whatever_they_quote(words: str) -> None:
    said = str(InvalidInput(words, found=words, expected=words, remedy=words))
    assert said.replace("\n", "").isprintable()
    assert len(said) < 20_000
    assert to_printable("plain\nwords") == "plain\nwords"


def test_links_of_the_hubs_cache_are_read_and_others_are_not(tmp_path: Path) -> None:
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "1").write_text(json.dumps(CONFIG))
    (tmp_path / "secret.json").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    assert parsing.read_json(snapshot / "config.json") == CONFIG
    for target in ("../../../secret.json", "../../secret.json", "../../blobs/../../secret.json"):
        (snapshot / "other.json").unlink(missing_ok=True)
        (snapshot / "other.json").symlink_to(target)
        with pytest.raises(InvalidInput, match="a link to"):
            parsing.read_json(snapshot / "other.json")
    elsewhere = tmp_path / "snapshots" / "abc"
    elsewhere.mkdir(parents=True)
    (elsewhere / "config.json").symlink_to(blobs / "1")
    with pytest.raises(InvalidInput, match="a link to"):
        parsing.read_json(elsewhere / "config.json")


def test_a_link_inside_the_directory_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").symlink_to("a.json")
    assert parsing.read_json(tmp_path / "b.json") == {}
    assert parsing.plain_file(tmp_path / "b.json", within=tmp_path) == tmp_path / "a.json"


@pytest.mark.parametrize(
    ("create", "refusal"),
    [(os.mkfifo, "no longer a plain file"), (lambda path: path.symlink_to("/etc/passwd"), "cannot be read")],
)
def test_what_became_a_pipe_or_a_link_after_it_was_looked_at_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, create: Callable[[Path], object], refusal: str
) -> None:
    create(tmp_path / "file")
    monkeypatch.setattr("mergegate.merge_core.parsing.files.plain_file", lambda path, within=None: path)
    with pytest.raises(InvalidInput, match=refusal):
        parsing.open_plain(tmp_path / "file")


def test_a_companion_that_becomes_a_link_out_does_not_travel(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "base")
    (place / "merges.txt").write_text("a b\n")
    recipe = load_recipe("merge_method: passthrough\nmodels: [{model: ./base}]\n")
    plan = plan_merge(recipe, {"./base": open_checkpoint(place)})
    (place / "merges.txt").unlink()
    (place / "merges.txt").symlink_to("/etc/passwd")
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidInput, match="a link to /etc/passwd"):
        write_companions(plan, tmp_path / "out")


def seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    with suppress(InvalidInput):
        work()
    return time.process_time() - started


@pytest.mark.story
def test_a_pickle_takes_time_as_it_has_bytes(tmp_path: Path) -> None:
    """Marks far below a long stack: a search from the bottom took one second for 16 kB and four for 32 kB."""

    def file(count: int) -> Path:
        path = tmp_path / f"{count}.bin"
        body = b"N" * count + b"(t" * count
        path.write_bytes(torch_zip({"a/data.pkl": pickled(body)}))
        return path

    small, large = file(20_000), file(200_000)
    quick = min(seconds(lambda: read_pickled(small)) for _ in range(3))
    assert seconds(lambda: read_pickled(large)) < 40 * quick + 0.5


def test_vocabularies_that_share_nothing_are_compared_at_once() -> None:
    count = 50_000
    one = Vocabulary({f"a{n}": n for n in range(count)})
    other = Vocabulary({f"a{n}": n + 1 for n in range(count)} | {"b": 0})
    assert seconds(lambda: vocabulary_differences(one, other)) < 5
    assert len(vocabulary_differences(one, other)[0]) == count


def test_lines_are_bounded_in_length_and_number(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a\nbb\nccc\n")
    assert list(parsing.read_lines(tmp_path / "x", longest=4, most=3)) == [(1, b"a\n"), (2, b"bb\n"), (3, b"ccc\n")]
    with pytest.raises(InvalidInput, match="line 3: over 3 bytes"):
        list(parsing.read_lines(tmp_path / "x", longest=3, most=3))
    with pytest.raises(InvalidInput, match="over 2 lines"):
        list(parsing.read_lines(tmp_path / "x", longest=9, most=2))


PACKAGE = {"package/__init__.py": "", "package/inner.py": "x = 1\n"}


@pytest.mark.parametrize(
    ("files", "changed"),
    [
        ({"f.py": "import helper\n", "helper.py": "x = 1\n"}, "helper.py"),
        ({"f.py": "from helper import x\n", "helper.py": "import deeper\n", "deeper.py": "x = 1\n"}, "deeper.py"),
        ({"f.py": "from . import helper\n", "helper.py": "x = 1\n"}, "helper.py"),
        ({"f.py": "def g():\n    import package.inner\n", **PACKAGE}, "package/inner.py"),
        ({"f.py": "from package import inner\n", **PACKAGE}, "package/__init__.py"),
    ],
)
def test_a_task_is_another_when_what_its_function_imports_is(
    tmp_path: Path, files: dict[str, str], changed: str
) -> None:
    for name, content in {**files, "letters.jsonl": "{}\n", "beside.py": "x = 1\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "task.yaml").write_text(TASK + "process_docs: !function f.g\n")
    before = pin_task("task.yaml", tmp_path, HashMemo(tmp_path / "a.sqlite")).digest
    (tmp_path / "beside.py").write_text("x = 22\n")
    assert pin_task("task.yaml", tmp_path, HashMemo(tmp_path / "b.sqlite")).digest == before
    (tmp_path / changed).write_text("x = 22\n")
    assert pin_task("task.yaml", tmp_path, HashMemo(tmp_path / "c.sqlite")).digest != before


def test_code_that_would_travel_blocks_until_it_is_accepted_by_name(tmp_path: Path) -> None:
    for name in ("base", "other"):
        place = checkpoint(tmp_path / name)
        (place / "modeling_x.py").write_text("raise SystemExit\n")
        (place / "config.json").write_text(json.dumps({**CONFIG, "auto_map": {"AutoModel": "org/far--modeling_y.Y"}}))
        (place / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tok.Slow", null]}}')
    recipe = load_recipe(RECIPE)
    opened = {f"./{name}": open_checkpoint(tmp_path / name) for name in ("base", "other")}
    plan = plan_merge(recipe, opened)
    names = {"modeling_x.py", "org/far--modeling_y.Y", "tok.Slow"}
    found = custom_code_findings(plan, ())
    assert {finding.severity for finding in found} == {"block"}
    assert all(any(name in finding.found for finding in found) for name in names)
    assert {finding.severity for finding in custom_code_findings(plan, names)} == {"info"}
    assert [one.severity for one in custom_code_findings(plan, names - {"tok.Slow"})].count("block") == 1
    assert {finding.severity for finding in custom_code_findings(plan, None)} == {"warn"}
