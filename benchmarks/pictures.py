"""The pictures in ``docs/``: a run on a terminal, the report in light and dark, wide and narrow, and the history.

::

    .venv/bin/python benchmarks/pictures.py            # a minute; needs Chromium (or CHROMIUM=/path/to/it)

Runs the demo, a demo that the gate refuses and one that a check refuses, in a directory of their own, then looks at
their pages with a browser that is not on screen. Pictures are written with 64 colours.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from PIL import Image

PROJECT = Path(__file__).resolve().parent.parent
DOCS = PROJECT / "docs" / "pictures"
REPORTS = {"passed": "demo", "refused-by-gate": "demo-refused", "refused-by-check": "demo-forbidden"}
HEIGHTS = {1280: 1500, 400: 1500}  # pixels of each width that are shown
DARK = "@media (prefers-color-scheme: dark)"
TERMINAL = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #15181c; color: #e4e7eb; }}
pre {{ margin: 0; padding: 20px 24px; font: 15px/1.45 "DejaVu Sans Mono", monospace; }}
</style><pre>{text}</pre>"""


def main() -> None:
    DOCS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        shutil.copytree(PROJECT / "profiles", work / "profiles")
        printed = {profile: run(work, profile) for profile in REPORTS.values()}
        run(work, "demo")  # nothing new, so that the history has something to draw
        terminal = work / "terminal.html"
        for name in ("demo", "demo-refused"):
            text = f"$ mergegate run profiles/{name}.yaml\n{printed[name]}"
            terminal.write_text(TERMINAL.format(text=escape(text)), encoding="utf-8")
            look(terminal, DOCS / f"terminal-{name}.png", 780, 22 * (text.count("\n") + 1) + 40)
        reports = work / ".mergegate" / "reports"
        for label, profile in REPORTS.items():
            for width, height in HEIGHTS.items():
                for dark in (False, True):
                    name = f"report-{label}-{width}-{'dark' if dark else 'light'}.png"
                    look(reports / f"{profile}.html", DOCS / name, width, height, dark=dark)
        look(reports / "index.html", DOCS / "history-1280-light.png", 1280, 1200)


def run(work: Path, profile: str) -> str:
    """What a run prints on a terminal of 80 columns."""
    command = [sys.executable, "-m", "mergegate", "run", f"profiles/{profile}.yaml"]
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(PROJECT)}
    ended = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    return f"{ended.stdout}{ended.stderr}".rstrip()


def look(page: Path, picture: Path, width: int, height: int, *, dark: bool = False) -> None:
    """The first ``height`` pixels of a page, in a frame of ``width``: a window cannot be as narrow as a phone."""
    shown = page.with_name("shown.html")
    text = page.read_text(encoding="utf-8")
    shown.write_text(text.replace(DARK, "@media all" if dark else "@media not all"), encoding="utf-8")
    frame = page.with_name("frame.html")
    style = f"border:0;width:{width}px;height:{height}px;display:block"
    frame.write_text(f'<body style="margin:0"><iframe src="shown.html" style="{style}"></iframe>', encoding="utf-8")
    raw = page.with_name("raw.png")
    browser = os.environ.get("CHROMIUM", "chromium")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={max(width, 600)},{height}",
    ]
    subprocess.run([browser, *options, f"--screenshot={raw}", frame.as_uri()], check=True, capture_output=True)
    with Image.open(raw) as full:
        full.crop((0, 0, width, height)).quantize(64).save(picture, optimize=True)
    for file in (shown, frame, raw):
        file.unlink()


if __name__ == "__main__":
    main()
