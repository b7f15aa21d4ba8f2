"""Terminal layout: from 80 columns up, no output line wraps and no name or number is cut."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text
from samples import sampled
from typer.testing import CliRunner

from mergegate.flows.cli.app import app
from mergegate.flows.operations import progress
from mergegate.flows.operations.console import FittingConsole, print_table, wrap_line
from mergegate.flows.operations.merge import _bar
from mergegate.flows.operations.progress import TerminalProgress, fit_text
from mergegate.flows.operations.summary import print_scores
from mergegate.tasks.base.stage import Pulse
from mergegate.tasks.release.report import DECISION_COLUMNS, Row, ScoreTable

WIDTHS = (80, 120, 200)
TASKS = ("arc_challenge", "leaderboard_bbh_tracking_shuffled_objects", "mmlu_high_school_european_history", "copy")
MODELS = ("SmolLM2-135M", "SmolLM2-135M-Instruct", "smollm2-135m-maths-sft", "tülu", "merge")
DROP = "12.5 [0.7, 13.3]"


def printed(width: int, draw: object, *, terminal: bool = False) -> list[str]:
    """Return the lines that a terminal of the given width receives."""
    console = FittingConsole(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    draw(console)  # type: ignore[operator]
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def score_table(models: int) -> ScoreTable:
    names = (*MODELS[: min(models, len(MODELS)) - 1], *(f"model-{at}" for at in range(models - len(MODELS))), "merge")
    rows = []
    for at, (task, word) in enumerate(zip(TASKS, ("pass", "fail", "inconclusive", "pass"), strict=True)):
        scores = [f"{10 * at + number}.5{' *' if number == 1 else ''}" for number in range(models)]
        cells = (task, *scores, names[0], DROP, "3", "11/task", word)
        rows.append(Row(cells, reference_score=f"{10 * at}.5"))
    left_out = Row(("reverse", *("",) * models, names[0], "", "3", "", f"skipped: {TASKS[1]} had already failed"))
    return ScoreTable("t", ("task", *names, *DECISION_COLUMNS), (*rows, left_out))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("models", [1, 5, 30])
def test_the_score_table_shows_every_task_whole(width: int, models: int) -> None:
    lines = printed(width, lambda console: print_scores(console, score_table(models)))
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for task in TASKS:
        assert sum(line.split()[0] == task for line in lines if line.split()) == 1
    assert text.count(DROP) == len(TASKS)
    for at in range(len(TASKS)):
        assert f"{10 * at + models - 1}.5" in text  # The score of the merge.
    assert f"reverse skipped: {TASKS[1]} had already failed" in lines


@pytest.mark.parametrize("width", WIDTHS)
def test_every_row_names_its_reference_and_all_models_while_there_is_room(width: int) -> None:
    lines = printed(width, lambda console: print_scores(console, score_table(5)))
    assert sum(MODELS[0] in line for line in lines) == len(TASKS) + 1 + (width == 200)
    assert all(model in lines[0] for model in MODELS) is (width == 200)
    assert ("Only the reference of each row is shown. The report has all models." in lines) is (width < 200)


@pytest.mark.parametrize("width", WIDTHS)
def test_another_table_that_is_too_wide_is_a_list(width: int) -> None:
    columns = ("served", "ready after", "first token", "tokens/s", "memory", "")
    rows = [("merge", "12.5 s", "38 ms", "1,204", "2.47 GB", "2026-11-20, 2 cores of a machine with a long name " * 2)]
    lines = printed(width, lambda console: print_table(console, columns, rows, numbers=True))
    assert all(cell in " ".join(lines) for cell in rows[0][:5])
    assert (len(lines) == 2) is (width == 200)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("terminal", [True, False])
def test_a_stage_has_its_time_in_a_column_and_a_long_result_below_itself(width: int, terminal: bool) -> None:
    def draw(console: Console) -> None:
        shown = TerminalProgress(console)
        shown.headline("support-assistant-of-the-north · ties of 3 over HuggingFaceTB/SmolLM2-135M", "profile p.yaml")
        for at, text in enumerate(("short", "a long text · " * 20, "one-word" * 40)):
            shown.on_start(f"stage-{at}", "")
            shown.on_end(f"stage-{at}", "", "made", 12.25, text)
        console.print(shown._draw()) if terminal else shown._print_ended()

    lines = printed(width, draw, terminal=terminal)
    assert "support-assistant-of-the-north · ties of 3 over HuggingFaceTB/SmolLM2-135M" in lines[0]
    assert "profile p.yaml" in (lines[0] if width >= 100 else lines[1])
    stages = [line for line in lines if "stage-" in line]
    assert len(stages) == 3
    assert all(line.endswith("12.2 s") for line in stages)
    assert {cell_len(line) for line in stages[:2]} == {min(width, 100)}
    wrapped = lines[lines.index(stages[1]) : lines.index(stages[2])]
    results = [line[16 : min(width, 100) - 6].strip() for line in wrapped]
    assert " ".join(results) == ("a long text · " * 20).strip()  # no word is cut or broken
    if terminal:  # a longer line would disturb the cursor
        assert max(map(cell_len, lines)) <= width
    else:  # a log gets the full text
        assert "one-word" * 40 in stages[2]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("✓ power: copy: a drop of 3.1 points", ["✓ power: copy: a drop of 3.1", "  points"]),
        ("last  demo released today at noon", ["last  demo released today at", "      noon"]),
        ("    remedy:   choose another one", ["    remedy:   choose another", "              one"]),
        ("  report  a/path/that/is/longer/than/the/line", ["  report  a/path/that/is/longer/than/the/line"]),
        ("see a/path/that/is/longer/than/the/line", ["see", "  a/path/that/is/longer/than/the/line"]),
        ("fits", ["fits"]),
    ],
)
def test_a_long_line_continues_below_its_text(text: str, lines: list[str]) -> None:
    assert [line.plain for line in wrap_line(Text(text), 28)] == lines


@pytest.mark.parametrize("text", ["out[/b]", "[bold]models[/bold]", r"a\[b]", "{task.fields}"])
def test_text_with_brackets_is_printed_as_it_is(text: str) -> None:
    assert printed(80, lambda console: console.print(text)) == [text]
    assert printed(80, lambda console: console.print(f"{text}:", 7)) == [f"{text}: 7"]
    with _bar(FittingConsole(file=io.StringIO(), width=200, force_terminal=True, color_system=None)) as bar:
        bar.add_task(text, total=None)
    assert text in bar.console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [30, 60, 200])
def test_a_table_that_is_too_wide_shrinks_at_words_or_becomes_a_list(width: int) -> None:
    rows = [("compat", "c76244f3f46b", "the last release of the demo"), ("merge", "efb1d7d4328a", "not needed")]
    table = Table("stage", "key", "kept because", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console = FittingConsole(file=io.StringIO(), width=width)
    console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(cell_len, lines)) <= width
    words = set(" ".join(lines).split())
    assert words >= {word for row in rows for cell in row for word in cell.split()}


def test_long_text_is_cut_at_a_part_or_a_word() -> None:
    assert fit_text("sign conflict 44 % · merge moved far", 40) == "sign conflict 44 % · merge moved far"
    assert fit_text("sign conflict 44 % · merge moved far", 30) == "sign conflict 44 % · …"
    assert fit_text("cached: base, reverser, shifter", 25) == "cached: base, reverser, …"
    assert fit_text("x" * 30, 10) == "x" * 9 + "…"
    assert fit_text("two\nlines", 20) == "two lines"


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_without_a_cursor_gets_each_line_once(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    shown = TerminalProgress(console)
    with shown.watching():
        shown.on_start("merge", "")
        shown.on_end("merge", "", "made", 1.0, "29 tensors")
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert out.count("29 tensors") == 1
    assert "\x1b[2K" not in out  # The escape sequence that redraws a line.


def test_a_log_reports_progress_every_half_minute() -> None:
    clock, said = SimpleNamespace(now=0.0), []
    pulse = Pulse(said.append, lambda: clock.now)
    pulse.on_start("perplexity", "base")
    pulse.on_start("merge", "")
    for second in range(0, 100, 5):
        clock.now = 100.0 + second
        pulse.on_progress("perplexity", "base", 1000 * second, 100_000, "tokens")
    assert said == [
        "perplexity base: 0 of 100,000 tokens",
        "perplexity base: 30,000 of 100,000 tokens · 1,000/s · 1 m 10 s left",
        "perplexity base: 60,000 of 100,000 tokens · 1,000/s · 40 s left",
        "perplexity base: 90,000 of 100,000 tokens · 1,000/s · 10 s left",
    ]
    pulse.on_end("perplexity", "base")
    clock.now += 60
    pulse.on_progress("perplexity", "base", 1, 2, "tokens")
    pulse.on_progress("merge", "", 500_000_000, 2_000_000_000, "B")
    pulse.on_description("merge", "", lambda width: f"in {width} characters")
    assert said[4:] == ["merge: 500 MB of 2 GB"]
    clock.now = 1000.0
    pulse.on_start("evaluate", "merge")  # a short stage says nothing on the way
    for second in range(29):
        clock.now = 1000.0 + second
        pulse.on_progress("evaluate", "merge", second, 29, "requests of copy")
    pulse.on_end("evaluate", "merge")
    assert len(said) == 5


@pytest.mark.parametrize("quiet", [True, False])
def test_a_pipe_and_json_have_progress_on_standard_error(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    shown = TerminalProgress(Console(file=sys.stdout, quiet=quiet, width=100))
    with shown.watching():
        shown.on_start("evaluate", "merge")
        shown.on_progress("evaluate", "merge", 0, 1319, "requests of gsm8k")
        clock.now += 40
        shown.on_progress("evaluate", "merge", 400, 1319, "requests of gsm8k")
        shown.on_end("evaluate", "merge", "made", 40.0, "gsm8k 51.0")
    out, err = capsys.readouterr()
    assert err == "  evaluate merge: 400 of 1,319 requests of gsm8k · 10/s · 1 m 32 s left\n"
    assert ("gsm8k 51.0" in out) is not quiet


def described(command: Any) -> Iterator[tuple[str, Any]]:
    """Yield each command with its full name, such as ``store gc``."""
    for name, below in getattr(command, "commands", {}).items():
        yield name, below
        yield from ((f"{name} {inner}", one) for inner, one in described(below))


HELP_GROUPS = ("Release", "Merge", "Evaluate", "Inspect", "Operate", "Watch")
VERBS = (
    "Approve Check Compare Explain Export Extract Fetch Find Forecast Give Judge List Merge Open Print Promote Rebuild "
    "Release Remove Return Run Search Send Serve Show Start Test Update Verify Write"
)
COMMANDS = dict(described(typer.main.get_command(app)))
LEAVES = {name: command for name, command in COMMANDS.items() if not hasattr(command, "commands")}


def test_the_help_lists_every_command_in_one_of_six_groups_with_a_summary() -> None:
    shown = CliRunner().invoke(app, ["-h"]).output
    listing = shown[shown.index("Release:") : shown.index("Start with:")]
    titles = [line.removesuffix(":") for line in listing.splitlines() if line and not line.startswith(" ")]
    assert tuple(titles) == HELP_GROUPS
    listed = [line.split()[0] for line in listing.splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted(name for name in COMMANDS if " " not in name)
    for name, command in COMMANDS.items():
        assert " " in name or command.rich_help_panel in HELP_GROUPS, name
        summary = command.short_help
        assert summary.split()[0].rstrip(",") in VERBS.split(), name
        assert summary.endswith("."), name
        assert len(summary) <= 60, name
        assert " ".join(str(command.help).split()).startswith(summary), name
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        assert all(one.metavar.isupper() or "=" in one.metavar for one in arguments), name


@pytest.mark.parametrize("name", sampled(LEAVES, list(LEAVES)[::4]))
def test_the_help_of_a_command_ends_with_examples_that_parse(name: str) -> None:
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"}).output
    assert max(map(cell_len, shown.splitlines())) <= 80
    command = LEAVES[name]
    examples = command.epilog.splitlines()
    assert 1 <= len(examples) <= 3
    assert shown.rstrip().endswith("\n".join(f"  {example}" for example in examples))
    for example in examples:
        program, *words = shlex.split(example.partition(" > ")[0])
        assert program == "mergegate"
        tail = words[len(name.split()) :] if words[: len(name.split())] == name.split() else words[1:]  # shadow PROFILE
        command.make_context(name, tail)  # an unknown option or a missing argument raises an error
    for option in (one for one in command.params if one.param_type_name == "option" and not one.hidden):
        assert option.help[0].isupper(), (name, option.name)
        assert option.help.endswith("."), (name, option.name)


@pytest.mark.story
def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "mergegate", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mergegate ")
