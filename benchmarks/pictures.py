"""Take the pictures in ``docs/pictures/``: terminal, reports, history, and the page of a watched release.

::

    .venv/bin/python benchmarks/pictures.py             # those of the pages; needs Chromium
    .venv/bin/python benchmarks/pictures.py --all DIR   # every page in two widths, light and dark, and the terminal

The script runs the demo in a separate directory (one minute), takes screenshots of its output and its pages, and saves
them as PNG with a palette. The terminal has 80 columns, and the reports show a passed and a refused release. The
watched release has simulated traffic. Review the pictures yourself: nothing here checks them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

PROJECT = Path(__file__).resolve().parents[1]
PROFILES = {"passed": "demo", "refused-by-gate": "demo-lopsided", "refused-by-check": "demo-forbidden"}
WIDTHS = (1280, 400)
TALLEST = 7000  # pixels of a page, before the empty part is cropped
COLORS = 64
TOP = 1080  # pixels of a report that the README shows
PICTURES = PROJECT / "docs" / "pictures"


def main() -> None:
    """Take all pictures, or one picture of a run's output (``--terminal``, for a separate process)."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", type=Path, metavar="DIR", help="save the picture of every page in this directory")
    parser.add_argument("--terminal", nargs=2, metavar=("PROFILE", "SVG"))
    parser.add_argument("--shadow", action="store_true", help="only the page of a watched release")
    asked = parser.parse_args()
    if asked.terminal:
        print_run(*asked.terminal)
        return
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("chromium is not installed (Debian: apt-get install chromium)")
    photograph_shadow(chromium, PICTURES / "shadow.png")
    if asked.shadow:
        return
    with tempfile.TemporaryDirectory() as place:
        project = Path(place)
        out = asked.all.absolute() if asked.all else project / "pictures"
        out.mkdir(parents=True, exist_ok=True)
        shutil.copytree(PROJECT / "profiles", project / "profiles")
        reports = project / ".mergegate" / "reports"
        for name, profile in PROFILES.items():
            svg = project / f"{name}.svg"
            again = [sys.executable, str(Path(__file__).resolve()), "--terminal", f"profiles/{profile}.yaml", str(svg)]
            environment = {**os.environ, "PYTHONPATH": str(PROJECT), "TERM": "dumb"}
            subprocess.run(again, cwd=project, env=environment, check=True)
            photograph(chromium, svg, out / f"terminal-{name}.png", 1000, dark=False)
            for width in WIDTHS:
                for dark in (False, True):
                    picture = out / f"report-{name}-{width}-{'dark' if dark else 'light'}.png"
                    photograph(chromium, reports / f"{profile}.html", picture, width, dark=dark)
        for scheme in ("light", "dark"):
            with Image.open(out / f"report-refused-by-gate-1280-{scheme}.png") as whole:
                whole.crop((0, 0, whole.width, TOP)).save(PICTURES / f"report-top-{scheme}.png", optimize=True)
        for width in WIDTHS:
            for dark in (False, True):
                picture = out / f"history-{width}-{'dark' if dark else 'light'}.png"
                photograph(chromium, reports / "index.html", picture, width, dark=dark)


def photograph_shadow(chromium: str, picture: Path) -> None:
    """Photograph the page of a release that was watched for a day; only the traffic is simulated."""
    sys.path[:0] = [str(PROJECT), str(PROJECT / "tests" / "shadow")]
    from shadow_pages import EVERY

    from mergegate.tasks.release.report import render_shadow

    with tempfile.TemporaryDirectory() as place:
        page = Path(place) / "shadow.html"
        page.write_text(render_shadow(EVERY["promoted"]()), encoding="utf-8")
        photograph(chromium, page, picture, WIDTHS[0], dark=False)


def print_run(profile: str, svg: str) -> None:
    """Run a profile on a recording terminal of 80 columns."""
    import typer

    from mergegate.flows.cli import run
    from mergegate.flows.operations import console

    terminal = console.FittingConsole(record=True, file=io.StringIO(), width=80, force_terminal=True, highlight=False)
    console.FittingConsole = lambda **_: terminal  # type: ignore[assignment,misc]
    with contextlib.suppress(typer.Exit):
        run.run_command(Path(profile))
    terminal.print()  # ends the picture within its last line
    terminal.save_svg(svg, title=f"mergegate run {profile}")


def photograph(chromium: str, page: Path, picture: Path, width: int, *, dark: bool) -> None:
    """Photograph the whole of ``page`` at ``width`` pixels, and crop the empty part at the bottom."""
    with tempfile.TemporaryDirectory() as place:
        address = page.absolute().as_uri()
        shown = f'<iframe src="{address}" width="{width}" height="{TALLEST}" style="border:0"></iframe>'
        if page.suffix == ".svg":
            shown = f'<img src="{address}" width="{width}">'
        # A window cannot be narrower than 500 pixels, but a frame in it can.
        frame = Path(place) / "frame.html"
        frame.write_text('<meta name="color-scheme" content="light dark"><style>body{margin:0}</style>' + shown)
        taken = Path(place) / "taken.png"
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--user-data-dir={place}/profile"]
        command += [f"--window-size={max(width, 500)},{TALLEST}", f"--screenshot={taken}", frame.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        image = Image.open(taken).convert("RGB").crop((0, 0, width, TALLEST))
    empty = Image.new("RGB", image.size, image.getpixel((width - 2, TALLEST - 2)))
    used = ImageChops.difference(image, empty).getbbox() or (0, 0, width, TALLEST)
    image = image.crop((0, 0, width, min(used[3] + 24, TALLEST)))
    image.quantize(COLORS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(picture, optimize=True)
    print(f"{picture.name}: {image.size[0]} x {image.size[1]}, {picture.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
