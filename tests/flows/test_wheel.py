"""Installation without a clone: the wheel contains the demo and all files that the program reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from benchmark_scripts import load_benchmark

from mergegate.flows.cli.run import PROFILE, copy_demo
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.base.sandbox import require_linux

PROJECT = Path(__file__).resolve().parents[2]
FLOORS = ("flows", "tasks", "merge_core")


def tracked(*places: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", *places], cwd=PROJECT, capture_output=True, text=True, check=True)
    return set(listed.stdout.splitlines())


@pytest.mark.story
def test_the_wheel_has_every_file_of_the_floors_and_of_the_demo(tmp_path: Path) -> None:
    source = tmp_path / "source"
    public = {f"mergegate/{name}" for name in ("__init__.py", "__main__.py", "api.py", "results.py", "py.typed")}
    wanted = tracked(*FLOORS, "profiles", *public, "pyproject.toml", "README.md", "LICENSE")
    for file in wanted:
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PROJECT / file, source / file)
    for floor in FLOORS:
        (source / "mergegate" / floor).symlink_to(Path("..", floor))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("mergegate-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        data = {name.partition(".data/data/share/mergegate/")[2] for name in inside} - {""}
        for name in sorted(data):
            (member,) = (one for one in inside if one.endswith(f".data/data/share/mergegate/{name}"))
            assert archive.read(member) == (PROJECT / name).read_bytes(), name
    assert {f"mergegate/{file}" for file in wanted if file.partition("/")[0] in FLOORS} - inside == set()
    assert public <= inside
    # No other package is importable, so a user's own `flows` or `tasks` package cannot collide with ours.
    assert {name.partition("/")[0] for name in inside if name.endswith(".py") and ".data/" not in name} == {"mergegate"}
    # Installing the wheel leaves an existing package called `tasks` unchanged.
    neighbor = tmp_path / "site" / "tasks" / "__init__.py"
    neighbor.parent.mkdir(parents=True)
    neighbor.write_text("MINE = True\n")
    target = ["--target", str(tmp_path / "site"), "--upgrade"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *target, str(wheel)], check=True)
    assert neighbor.read_text() == "MINE = True\n"
    assert [file.name for file in neighbor.parent.iterdir()] == ["__init__.py"]
    assert data == {file for file in wanted if file.startswith("profiles/")}


@pytest.mark.story
def test_a_users_own_packages_do_not_hide_ours(tmp_path: Path) -> None:
    """Every Prefect project has a `flows/` directory, and some projects run with PYTHONPATH=. in it."""
    for folder in FLOORS:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("raise RuntimeError('the user package was imported')\n")
    command = [sys.executable, "-m", "mergegate", "methods"]
    environment = {**os.environ, "PYTHONPATH": "."}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.proof
def test_the_wheel_alone_is_all_that_a_first_hour_needs(tmp_path: Path) -> None:
    bare = load_benchmark("bare_wheel")
    programs = bare.bare_environment(tmp_path / "environment", bare.build(tmp_path))
    place = tmp_path / "elsewhere"
    place.mkdir()
    (imported,) = bare.imported_from(programs, place)
    assert imported.is_relative_to(tmp_path / "environment")
    wrong = [used for used in bare.use(programs, place) if used.code != used.expected or "Traceback" in used.said]
    assert wrong == []


def test_the_demo_is_copied_once_and_over_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "new" / "mergegate-demo"
    assert copy_demo(place)
    copied = {str(file.relative_to(place)) for file in place.rglob("*") if file.is_file()}
    assert copied >= {file for file in tracked("profiles/demo", "profiles/demo.yaml") if not file.endswith(".py")}
    (place / PROFILE).write_text("name: mine\n")
    assert not copy_demo(place)
    assert (place / PROFILE).read_text() == "name: mine\n"
    with pytest.raises(InvalidInput, match="a directory with other content"):
        copy_demo(tmp_path / "new")


def test_other_systems_than_linux_are_refused_with_a_remedy() -> None:
    require_linux("linux")
    with pytest.raises(Refused, match="darwin") as told:
        require_linux("darwin")
    assert "container" in str(told.value)
