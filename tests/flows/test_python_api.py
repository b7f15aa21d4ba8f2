"""The Python API runs the code of the commands, works in a notebook, and is documented by examples that work."""

from __future__ import annotations

import asyncio
import doctest
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from demo_project import PROFILES, Printed, Project, make_project
from lm_eval_runs import run_lm_eval
from notebook_cells import code_cells
from rich.console import Console

import mergegate
from mergegate.api import _override_texts
from mergegate.flows.outcome import RunOutcome

pytestmark = pytest.mark.story

PROJECT = PROFILES.parent
NOTEBOOK = PROJECT / "docs" / "tutorials" / "python-api.ipynb"
MODELS = PROFILES / "demo" / "models"
# The guards of the example for `mergegate.gate`.
GUARDS = """name: reverse
recipe: demo/recipes/ties.yaml
evaluate: {dtype: bfloat16, tasks: [{task: demo/tasks/reverse.yaml, guarded_by: reverser, max_drop: 3}]}
"""


@pytest.fixture
def demo(released: tuple[Project, Printed], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a project with a released demo, as the working directory."""
    project, _ = released
    monkeypatch.chdir(project.root)
    monkeypatch.delenv("MERGEGATE_HOME", raising=False)
    return project.root


@pytest.fixture(scope="session")
def lm_eval_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with lm-eval's results of two equal models."""
    out = tmp_path_factory.mktemp("lm-eval")
    run_lm_eval(out / "reverser", MODELS / "reverser", [PROFILES / "demo/tasks/reverse.yaml"], out / "scratch")
    shutil.copytree(out / "reverser", out / "merge")
    return out


def documented() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(recurse=False)
    for name in mergegate.__all__:
        member = getattr(mergegate, name)
        if member.__module__ in ("mergegate.api", "mergegate.results"):
            yield from finder.find(member, name, globs={"mergegate": mergegate, "Path": Path})


EXAMPLES = {test.name: test for test in documented() if test.examples}


def test_every_function_has_an_example_and_every_public_name_exists() -> None:
    functions = {name for name in mergegate.__all__ if getattr(mergegate, name).__module__ == "mergegate.api"}
    assert len(functions) == 11
    assert functions - set(EXAMPLES) == set()
    assert all(getattr(mergegate, name).__name__ == name for name in mergegate.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mergegate.no_such_name


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_works(name: str, demo: Path, lm_eval_results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each example runs on the demo project, inside an event loop, as in a notebook."""
    if not (demo / "lm-eval").exists():
        (demo / "lm-eval").symlink_to(lm_eval_results)
        (demo / "profiles" / "reverse.yaml").write_text(GUARDS)
    failures: list[str] = []

    async def in_event_loop() -> doctest.TestResults:
        return doctest.DocTestRunner().run(EXAMPLES[name], out=failures.append, clear_globs=False)

    assert asyncio.run(in_event_loop()).failed == 0, "".join(failures)
    assert capsys.readouterr().out == ""  # the examples print no progress


def test_importing_the_package_imports_no_library() -> None:
    code = """
import sys
import mergegate
assert set(mergegate.__all__) <= set(dir(mergegate))
heavy = {"torch", "prefect", "pydantic", "typer", "rich"} & set(sys.modules)
print(sorted(heavy))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.proof
def test_a_plain_script_in_another_directory_runs_the_flow_without_a_main_guard(
    demo: Path, tmp_path: Path, begin_records: Callable[[Path], None]
) -> None:
    begin_records(Project(demo).home)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, mergegate\n"
        "root = sys.argv[1]\n"
        "for documents in (400, 300):\n"
        "    result = mergegate.run(f'{root}/profiles/demo.yaml', {'evaluate.documents': documents}, publish=False,\n"
        "                           progress=False, project=root)\n"
        "    print(result.status)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_HOME"}
    done = subprocess.run(
        [sys.executable, str(script), str(demo)], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.stdout == "passed\npassed\n", done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py"]  # all state is in the project


def test_the_text_of_a_result_is_the_summary_of_the_command_after_plain_lines_of_progress(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = mergegate.run("profiles/demo.yaml")
    output = capsys.readouterr().out
    assert "= evaluate" in output
    assert "\x1b" not in output
    printed = " ".join(Project(demo).mergegate("run", "profiles/demo.yaml").output.split())
    for line in str(result).splitlines():
        assert " ".join(line.split()) in printed
    assert result.status == "nothing new"
    assert result.to_dict()["message"] == result.message


def test_a_release_refused_by_a_check_is_a_result(demo: Path) -> None:
    result = mergegate.run("profiles/demo-forbidden.yaml", progress=False)
    assert (result.status, result.verdict, result.passed, result.guards) == ("refused", None, False, ())
    assert result.finding is not None
    assert result.finding.where in result.message
    assert result.report is not None
    assert result.report.is_file()
    assert "refused" in result._repr_html_()


@pytest.mark.parametrize(
    "call",
    [
        lambda: mergegate.load_profile("profiles/nope.yaml"),
        lambda: mergegate.load_profile("profiles/demo.yaml", {"name": object()}),
        lambda: mergegate.load_profile("profiles/demo.yaml", "no value"),
        lambda: mergegate.plan("profiles/demo.yaml", device="tpu"),
        lambda: mergegate.run("profiles/demo.yaml", {"evaluate.tasks[0].max_drop": "much"}),
        lambda: mergegate.compare("nope", "profiles/demo/models/base", "profiles/demo.yaml", progress=False),
        lambda: mergegate.sweep("profiles/demo.yaml", progress=False),
        lambda: mergegate.verify("nope"),
        lambda: mergegate.export("releases/demo/latest", "helm", "new"),  # type: ignore[arg-type]
        lambda: mergegate.export("releases/demo/latest", "inspect", "new", organization=" x"),
    ],
)
def test_invalid_input_raises(call: object, demo: Path) -> None:
    with pytest.raises(mergegate.InvalidInput):
        call()  # type: ignore[operator]


def test_a_changed_release_raises_refused(demo: Path, tmp_path: Path) -> None:
    release = shutil.copytree((demo / "releases/demo/latest").resolve(), tmp_path / "copy")
    (release / "README.md").write_text("changed")
    with pytest.raises(mergegate.Refused, match=r"README\.md"):
        mergegate.verify(release)


def test_an_interruption_and_an_error_of_the_disk_are_converted(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> RunOutcome:
        raise OSError(28, "No space left on device", "file")

    monkeypatch.setattr("mergegate.api.run_release", full_disk)
    with pytest.raises(mergegate.DiskUnavailable):
        mergegate.run("profiles/demo.yaml")
    monkeypatch.setattr("mergegate.api.run_release", lambda *_: RunOutcome(status="interrupted", message="interrupted"))
    with pytest.raises(KeyboardInterrupt):
        mergegate.run("profiles/demo.yaml")


def test_a_project_argument_selects_the_state_for_one_call(tmp_path: Path, demo: Path) -> None:
    project = make_project(tmp_path / "second")
    assert mergegate.run(demo / "profiles/demo.yaml", progress=False).status == "nothing new"
    refused = mergegate.run(project.root / "profiles/demo-forbidden.yaml", progress=False, project=project.root)
    assert refused.report is not None
    assert refused.report.is_relative_to(project.home)
    assert "MERGEGATE_HOME" not in os.environ
    assert mergegate.run(demo / "profiles/demo.yaml", progress=False).status == "nothing new"


def test_a_profile_can_be_constructed_in_python(demo: Path) -> None:
    loaded = mergegate.load_profile("profiles/demo.yaml")
    sections = {name: getattr(loaded, name) for name in ("checks", "perplexity", "evaluate", "root")}
    profile = mergegate.Profile(name="constructed", recipe=loaded.root / loaded.recipe, **sections)
    result = mergegate.run(profile, progress=False)
    assert (result.status, result.verdict) == ("passed", "pass")


def test_html_escapes_every_text() -> None:
    script = "<script>alert(1)</script>"
    finding = mergegate.Finding("block", script, script, expected=script, remedy=script)
    stage = mergegate.StageEnd("licenses", script, "refused", 1.0, script)
    outcome = RunOutcome(
        status="refused", message=script, reasons=(script,), report=Path(script), stopped_by=finding, stages=(stage,)
    )
    html = mergegate.RunResult(outcome)._repr_html_()
    assert "<script>" not in html
    assert html.count("&lt;script&gt;") >= 6


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        ({"evaluate.documents": 200}, ("evaluate.documents=200",)),
        ({"publish": None, "a.b[0]": True}, ("publish=null", "a.b[0]=true")),
        ({"a": 1e-5, "b": "text", "c": "200"}, ("a=1.0e-05", "b=text", "c='200'")),
        ({"guard": {"max_drop": 2}, "list": [1, "x, y"]}, ("guard={max_drop: 2}", "list=[1, 'x, y']")),
        ({"path": Path("a/b")}, ("path=a/b",)),
        (["a=1", "b=2"], ("a=1", "b=2")),
        ("a=1", ("a=1",)),
        ((), ()),
    ],
)
def test_overrides_have_the_form_of_the_command_line(overrides: object, texts: tuple[str, ...]) -> None:
    assert _override_texts(overrides) == texts  # type: ignore[arg-type]


def test_a_notebook_without_widgets_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, demo: Path) -> None:
    consoles: list[Console] = []
    monkeypatch.setattr("mergegate.api.find_spec", lambda name: None)
    monkeypatch.setattr("mergegate.api.check_file", lambda profile, console: consoles.append(console))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    mergegate.check("profiles/demo.yaml")
    assert not consoles[0].is_jupyter


@pytest.mark.proof
def test_the_cells_of_the_tutorial_work_and_its_stored_outputs_are_current(
    tmp_path: Path, demo_release: Path, begin_records: Callable[[Path], None]
) -> None:
    """The cells run in a fresh process, on a project whose models were scored before."""
    root = make_project(tmp_path / "demo").root
    # `reproduce` finds parents below the project only if they are not behind a link.
    (root / "profiles" / "demo").unlink()
    shutil.copytree(PROFILES / "demo", root / "profiles" / "demo")
    shutil.copytree(demo_release / ".mergegate" / "store", root / ".mergegate" / "store")
    begin_records(root / ".mergegate")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT", "MERGEGATE"))}
    runner = Path(__file__).with_name("notebook_cells.py")
    done = subprocess.run(
        [sys.executable, str(runner), str(NOTEBOOK)], capture_output=True, text=True, cwd=root, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outputs: list[str] = json.loads(done.stdout.splitlines()[-1])
    cells = code_cells(NOTEBOOK)
    assert len(outputs) == len(cells)
    stored = {number: "".join(cell["outputs"][0]["text"]) for number, cell in enumerate(cells) if cell["outputs"]}
    assert len(stored) > 5
    assert stored == {number: outputs[number] for number in stored}


def test_the_tutorial_is_a_valid_notebook_without_paths_of_a_machine() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert all(cell["execution_count"] is None for cell in code_cells(NOTEBOOK))
    assert not any(word in text for word in ("/tmp/", "/home/", "/work/", "/root/"))
