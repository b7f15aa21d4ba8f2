"""``mergegate sweep``: what is searched, by a profile or by mergekit-evolve's YAML, and who may look on."""

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
from mergegate.tasks.sweep import count_layers, profile_of_evolve, serve_dashboard

PORT = 8080


def swept_profile(file: Path, console: Console) -> Path | Profile:
    """What the flow is given: the name of a profile, as Prefect keeps that; of mergekit-evolve's YAML a whole profile
    that says the same, and what it cannot say is named.

    Raises:
        InvalidInput: for a file that is neither.
    """
    documents = read_yaml(file, "a profile (YAML)")
    if len(documents) != 1 or not isinstance(documents[0], Mapping) or "genome" not in documents[0]:
        return file
    content = documents[0]
    converted = profile_of_evolve(content, file.stem, str(file), _layers(content, file.parent))
    console.print(Text(f"{file}: taken from mergekit-evolve; without"), style="bold")
    for lost in converted.not_carried:
        console.print(Text(f"  {lost.setting}: {lost.why}", style="dim"))
    return parse_profile({"root": file.absolute().parent, **converted.profile}, str(file))


def view_of(profile: Profile) -> str:
    """Where the study is written that the dashboard reads: where the profile says, else beside the scored trials."""
    return profile.sweep_view() or str(home() / "sweeps" / f"{profile.name}.optuna")


def look_on(view: str, console: Console) -> Callable[[], None]:
    """Serve Optuna's dashboard beside the sweep; what is returned waits until nobody wants to look any more."""
    console.print(Text(f"dashboard: http://127.0.0.1:{PORT}"))
    server = threading.Thread(target=serve_dashboard, args=(view, PORT), daemon=True)
    server.start()

    def wait() -> None:
        console.print(Text("the dashboard is still there; Ctrl-C ends it", style="dim"))
        server.join()

    return wait


def _layers(content: Mapping[str, object], directory: Path) -> int | None:
    """Of the first model, where it lies here; else nobody knows before it is fetched, and all layers have one value."""
    genome = content.get("genome")
    models = genome.get("models") if isinstance(genome, Mapping) else None
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("model") if isinstance(first, Mapping) else first
    if not isinstance(name, str) or not (directory / name).is_dir():
        return None
    return count_layers(open_checkpoint(directory / name).tensors)
