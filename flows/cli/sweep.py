"""``mergegate sweep``: choose the profile to sweep, also from mergekit-evolve's YAML, and serve the dashboard."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mergegate.flows.profile import Profile, parse_profile
from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.parsing import read_yaml
from mergegate.tasks.stage import home
from mergegate.tasks.sweep import convert_evolve_file, count_layers, serve_dashboard

PORT = 8080


def swept_profile(file: Path, console: Console) -> Path | Profile:
    """Return the argument of the sweep flow.

    For a profile, this is its path, as Prefect stores it. mergekit-evolve's YAML is converted to an equivalent profile,
    and settings without an equivalent are printed.

    Raises:
        InvalidInput: The file is neither.
    """
    documents = read_yaml(file, "a profile (YAML)")
    if len(documents) != 1 or not isinstance(documents[0], Mapping) or "genome" not in documents[0]:
        return file
    content = documents[0]
    converted = convert_evolve_file(content, file.stem, str(file), _layers(content, file.parent))
    console.print(Text(f"{file}: taken from mergekit-evolve; without"), style="bold")
    for lost in converted.unsupported:
        console.print(Text(f"  {lost.setting}: {lost.reason}", style="dim"))
    return parse_profile({"root": file.absolute().parent, **converted.profile}, str(file))


def view_of(profile: Profile) -> str:
    """Return the location of the study for the dashboard: that of the profile, or else next to the scored trials."""
    return profile.sweep_view() or str(home() / "sweeps" / f"{profile.name}.optuna")


def look_on(view: str, console: Console) -> Callable[[], None]:
    """Serve Optuna's dashboard during the sweep, and return a function that waits until the user ends it."""
    console.print(Text(f"dashboard: http://127.0.0.1:{PORT}"))
    server = threading.Thread(target=serve_dashboard, args=(view, PORT), daemon=True)
    server.start()

    def wait() -> None:
        console.print(Text("the dashboard is still there; Ctrl-C ends it", style="dim"))
        server.join()

    return wait


def _layers(content: Mapping[str, object], directory: Path) -> int | None:
    """Return the layer count of the first model. None if it is not local: then all layers share one value."""
    genome = content.get("genome")
    models = genome.get("models") if isinstance(genome, Mapping) else None
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("model") if isinstance(first, Mapping) else first
    if not isinstance(name, str) or not (directory / name).is_dir():
        return None
    return count_layers(open_checkpoint(directory / name).tensors)
