"""Follow a documentation page as a reader would: type its commands, write its files and compare its outputs.

The page needs no special markup. A fenced block means:

* ``bash``: Run the block in the directory that the previous block left, with the variables that it exported. A failing
  command ends the walk, unless the next block is ``echo $?``.
* ``bash`` with ``title="Terminal 2"``: Keep the block running in a terminal of its own until the end of the page.
* Any other language with a title: Write the block to the file that the title names.
* Any other language without a title, after a command: Compare the block with the output of the command.
* ``console``: Lines that begin with ``$`` are commands, and the lines below each are its output.

``…`` in an output block stands for any text. Line breaks, times, rates, dates, hashes, ports and the directory of the
walk are not compared.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from patience import HANG_S
from served_site import PROJECT, bare_environment, in_a_terminal_of_its_own, until

FENCE = re.compile(r"^```(?P<language>\w*)(?:[ ]+(?P<options>[^\n]*))?\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
SHELL = ("bash", "sh")
SHOW_CODE = "echo $?"
VARIABLE_PARTS = (
    (r"\x1b\[[0-9;]*m", ""),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?(\.\d+)?Z?", "DATE"),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "HASH"),
    (r"\b(?=[0-9a-f]*\d)[0-9a-f]{12,64}\b", "HASH"),
    (r"(?m)^ *[\w -]+ [\w.-]+: [\d,]+ of [\d,]+ \w+$", ""),  # progress of a step that takes long under load
    (r"\b[\d.,]+ [kMG]?B/s", "RATE"),
    (r"\b[\d.,]+ (?:s|min|h)\b", ""),
    (r"(?<=127\.0\.0\.1:)\d+", "PORT"),
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str
    text: str
    line: int

    @property
    def is_command(self) -> bool:
        return self.language in SHELL

    @property
    def own_terminal(self) -> bool:
        return self.is_command and self.title.startswith("Terminal ")


def blocks_of(page: Path, heading: str = "") -> list[Block]:
    """Return the blocks of a page, or of one section of level two."""
    text = page.read_text(encoding="utf-8")
    start, end = 0, len(text)
    if heading:
        start = text.index(f"\n## {heading}\n")
        end = text.find("\n## ", start + 1) if "\n## " in text[start + 1 :] else end
    found = []
    for match in FENCE.finditer(text, start, end):
        title = re.search(r'title="([^"]*)"', match["options"] or "")
        line = text.count("\n", 0, match.start()) + 1
        if match["language"] == "console":
            for command, output in re.findall(r"^\$ (.*\n)((?:(?!\$ ).*\n)*)", match["text"], re.MULTILINE):
                found += [Block("bash", "", command, line), Block("text", "", output, line)]
        else:
            found.append(Block(match["language"], title[1] if title else "", match["text"], line))
    return found


def comparable(text: str, root: Path) -> str:
    """Return an output on one line, without the parts that differ between runs."""
    text = text.replace(f"{root}/", "").replace(str(root), ".")
    for pattern, replacement in VARIABLE_PARTS:
        text = re.sub(pattern, replacement, text)
    return " ".join(text.split())


def matches(shown: str, printed: str, root: Path) -> bool:
    """Return whether a block agrees with the output of a command."""
    parts = (re.escape(part.strip()) for part in comparable(shown, root).split("…"))
    return re.fullmatch(".*?".join(parts), comparable(printed, root)) is not None


@dataclass
class Reader:
    """A user who follows pages in one directory.

    Attributes:
        root: Directory in which the walk begins.
        environment: Environment of all commands.
        replaced: Texts of the page that are replaced, such as an address that only the page's author has.
    """

    root: Path
    environment: Mapping[str, str]
    replaced: Mapping[str, str] = field(default_factory=dict)
    exit_code: int = 0
    output: str = ""

    def typed(self, text: str) -> str:
        for written, here in self.replaced.items():
            text = text.replace(written, here)
        return text

    @property
    def directory(self) -> Path:
        """Directory that the last command left."""
        state = self.root / ".walk.directory"
        return Path(state.read_text().strip()) if state.exists() else self.root

    def with_state(self, command: str) -> str:
        """Return a script that runs a command where the last one ended."""
        state = f"'{self.root}/.walk"
        restore = f"[ ! -e {state}.variables' ] || . {state}.variables'\ncd '{self.directory}'"
        keep = f'trap \'export -p > "{self.root}/.walk.variables"; pwd > "{self.root}/.walk.directory"\' EXIT'
        return f"{restore}\n{keep}\nset -e\n{self.typed(command)}"

    def run(self, block: Block) -> None:
        """Run a block and keep its output and exit code."""
        done = subprocess.run(
            ["bash", "-c", self.with_state(block.text)],
            env=dict(self.environment),
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        self.exit_code, self.output = done.returncode, done.stdout

    def follow(self, blocks: Sequence[Block], page: str) -> None:
        """Follow blocks in order. Fail at the first command that ends badly or prints something else than shown."""
        with ExitStack() as terminals:
            log: Path | None = None
            for number, block in enumerate(blocks):
                where = f"{page}, line {block.line}"
                if block.own_terminal:
                    running = in_a_terminal_of_its_own(self.with_state(block.text), self.root, dict(self.environment))
                    log = terminals.enter_context(running)
                elif block.text.strip() == SHOW_CODE:
                    self.output = f"{self.exit_code}\n"
                elif block.is_command:
                    log = None
                    self.run(block)
                    reads_code = SHOW_CODE in (following.text.strip() for following in blocks[number + 1 : number + 3])
                    assert self.exit_code == 0 or reads_code, f"{where}: {block.text}\n{self.output}"
                    assert "Traceback" not in self.output, f"{where}\n{self.output}"
                elif block.title:
                    file = self.directory / block.title
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(self.typed(block.text), encoding="utf-8")
                elif log is not None:
                    wait_for(self.typed(block.text), log, self.root, where)
                else:
                    shown = self.typed(block.text)
                    assert matches(shown, self.output, self.root), f"{where}: the output is now\n{self.output}"


def wait_for(shown: str, log: Path, root: Path, where: str) -> None:
    """Wait until a terminal shows the lines of a block."""

    def is_shown() -> bool:
        return matches(f"…\n{shown}…\n", log.read_text(), root)

    until(is_shown, where, log)


def fresh_clone(root: Path) -> Path:
    """Create a directory with the files of the project that a reader uses, and its environment in ``.venv``."""
    root.mkdir(parents=True, exist_ok=True)
    shutil.copytree(
        PROJECT / "profiles", root / "profiles", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "prefect.yaml", "schedules.yaml"):
        shutil.copy(PROJECT / name, root)
    environment = root / ".venv"
    environment.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (environment / name).symlink_to(Path(sys.prefix) / name)
    for ready in (environment / "ready", root / ".uv" / "ready"):  # newer than the files above: make installs nothing
        ready.parent.mkdir(exist_ok=True)
        ready.touch()
    return root


def reader(root: Path, replaced: Mapping[str, str] | None = None, **variables: str) -> Reader:
    """Return a reader with a terminal of 80 columns, without a browser."""
    environment = bare_environment(root, COLUMNS="80", BROWSER="true", OMP_NUM_THREADS="1", **variables)
    return Reader(root, environment, replaced or {})
