"""``mergegate init`` prompts on a terminal for unknown values, and never prompts when flags provide them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from model_families import FAMILIES, write_family
from terminal import terminal
from typer.testing import CliRunner

from mergegate.flows.cli.init import directory_for_new_files, prompt, write_new_files
from mergegate.merge_core.errors import InvalidInput

NAME, WHO, TEXT = "name of the release", "accept these license gaps?", "held-out text"
TASKS = "tasks that the merge must not lose"
MODELS = ("models/base", "models/sums", "models/verse")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a model family in which one model has no card, so its license is in doubt."""
    root = tmp_path_factory.mktemp("made")
    write_family(root, FAMILIES["qwen2"])
    (root / "verse" / "README.md").unlink()
    return root


@pytest.fixture
def root(tmp_path: Path, made: Path) -> Iterator[Path]:
    shutil.copytree(made, tmp_path / "models")
    return tmp_path


@pytest.fixture
def tasks(root: Path) -> Path:
    """Write two tasks with their own data, because no task of lm-eval has its data here."""
    with (root / "sums.jsonl").open("w") as data:
        data.writelines(f'{{"question": "{n} + 1 =", "answer": " {n + 1}"}}\n' for n in range(300))
    for name in ("plus", "more"):
        (root / f"{name}.yaml").write_text(
            f"task: {name}\ntest_split: test\n"
            "dataset_path: json\ndataset_kwargs: {data_files: {test: sums.jsonl}}\n"
            'output_type: loglikelihood\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
            "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
        )
    return root


def files_in(place: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in place.iterdir()} if place.exists() else {}


@pytest.mark.story
def test_enter_accepts_the_default(root: Path) -> None:
    shutil.copy(root / "models/base/README.md", root / "models/verse/README.md")
    with terminal(root, "init", *MODELS, "--out", "asked") as screen:
        for question, proposed in ((NAME, "[sums-verse]: "), (TEXT, "[sample]: "), (TASKS, "[none]: ")):
            screen.see(question)
            screen.see(proposed)
            screen.type("\n")
        assert screen.end() == 0, screen.shown
    assert WHO not in screen.shown  # no license is in doubt
    with terminal(root, "init", *MODELS, "--out", "told", "--yes") as screen:
        assert screen.end() == 0, screen.shown
    assert "name of the release" not in screen.shown
    assert files_in(root / "asked") == files_in(root / "told")
    assert set(files_in(root / "asked")) == {"sums-verse.yaml", "sums-verse.recipe.yaml", "held-out.sample.txt"}


@pytest.mark.story
def test_an_invalid_answer_is_prompted_again(tasks: Path) -> None:
    root = tasks
    (root / "taken.yaml").write_text("ours\n")
    (root / "empty.txt").touch()
    (root / "own.txt").write_text("A text.\n\nAnother one.\n")
    answers = {
        NAME: {"a/b": "letters, digits", "taken": "it exists", "mine": ""},
        WHO: {"me": "'name: reason'", "alice: we made it": ""},
        TEXT: {"nowhere.txt": "no such file", "models": "a directory", "empty.txt": "an empty file", "own.txt": ""},
        TASKS: {"nosuch_task": "nosuch_task", "plus.yaml:nobody": "best parent", "plus.yaml:sums, more.yaml": ""},
    }
    with terminal(root, "init", *MODELS) as screen:
        for question, typed in answers.items():
            for answer, why_not in typed.items():
                screen.see(question)
                screen.see(": ")
                screen.type(f"{answer}\n")
                if why_not:
                    screen.see("Error: ")
                    screen.see(why_not)
        assert screen.end() == 0, screen.shown
    assert (root / "taken.yaml").read_text() == "ours\n"
    profile = (root / "mine.yaml").read_text()
    assert "alice: we made it" in profile
    assert "documents: own.txt" in profile
    assert "{task: plus.yaml, guarded_by: sums, max_drop: 3}" in profile
    assert "{task: more.yaml, guarded_by: best parent, max_drop: 3}" in profile


@pytest.mark.story
@pytest.mark.parametrize("last", [NAME, WHO, TEXT, TASKS])
def test_ctrl_c_at_a_question_ends_it_and_leaves_nothing(root: Path, last: str) -> None:
    before = set(root.iterdir())
    with terminal(root, "init", *MODELS, "--out", "new/place") as screen:
        for question in (NAME, WHO, TEXT, TASKS):
            screen.see(question)
            screen.see(": ")
            if question == last:
                break
            screen.type("\n")
        assert screen.interrupt() == 130, screen.shown
    assert "Traceback" not in screen.shown
    assert set(root.iterdir()) - before <= {root / ".mergegate"}


@pytest.mark.story
def test_flags_answer_on_a_terminal_too(tasks: Path) -> None:
    root = tasks
    (root / "own.txt").write_text("A text.\n")
    flags = ("--name", "mine", "--accept", "alice: ours", "--data", "own.txt", "--task", "plus.yaml:sums")
    with terminal(root, "init", *MODELS, *flags) as screen:
        assert screen.end() == 0, screen.shown
    assert not [question for question in (NAME, WHO, TEXT, TASKS) if question in screen.shown]


def test_a_prompt_repeats_until_the_answer_is_valid() -> None:
    def even(text: str) -> str:
        if not text.isdigit() or int(text) % 2:
            raise InvalidInput("here", found=repr(text), expected="an even number")
        return text

    app = typer.Typer()
    app.command()(lambda: typer.echo(f"got {prompt('how many', '4', even)}"))
    done = CliRunner().invoke(app, input="x\n3\n 8 \n")
    assert "got 8" in done.output
    assert done.output.count("Error:") == 2
    assert "'3'; expected: an even number" in done.output
    assert "got 4" in CliRunner().invoke(app, input="\n").output


def test_files_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "new" / "place"
    with pytest.raises(KeyboardInterrupt), directory_for_new_files(place):
        raise KeyboardInterrupt
    assert not (tmp_path / "new").exists()
    with directory_for_new_files(place):
        write_new_files({place / "a": "1", place / "b": "2"})
    with pytest.raises(InvalidInput, match="b: it exists"), directory_for_new_files(place):
        write_new_files({place / "c": "3", place / "b": "4"})
    assert files_in(place) == {"a": "1", "b": "2"}
    with pytest.raises(UnicodeEncodeError):  # an error while a file is being written
        write_new_files({place / "c": "3", place / "d": "\ud800"})
    assert files_in(place) == {"a": "1", "b": "2"}
