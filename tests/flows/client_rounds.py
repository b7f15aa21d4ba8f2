"""Simulated clients for round merges: honest ones train the last release toward their skill, others attack it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from demo_project import PROFILES
from safetensors.torch import load_file, save_file

from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.adapters import ExtractionSettings, extract_adapter, write_adapter

MODELS = PROFILES / "demo/models"
STEP = 0.35  # fraction of the difference between the fine-tune and the base
HONEST = {"ada": "reverser", "ben": "reverser", "cleo": "shifter", "dan": "shifter"}
WEIGHTS = "model.safetensors"


def _wide(place: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(place / WEIGHTS).items()}


class Clients:
    """Clients that write their trained checkpoints into subdirectories of ``place``."""

    def __init__(self, place: Path) -> None:
        self.place = place
        base = _wide(MODELS / "base")
        self._ways = {skill: {n: t - base[n] for n, t in _wide(MODELS / skill).items()} for skill in HONEST.values()}
        self._draw = torch.Generator().manual_seed(0)

    def train(self, name: str, begin: Path) -> None:
        """Write an honest client: one step from ``begin`` toward its skill, with a little noise."""
        way = self._ways[HONEST[name]]
        self._save(name, begin, {key: STEP * self._noisy(one) for key, one in way.items()})

    def approach(self, name: str, begin: Path) -> None:
        """Write an honest client that moves a fraction of the remaining distance to its skill."""
        base, here = _wide(MODELS / "base"), _wide(begin)
        skills = list(self._ways)
        ways = torch.stack([torch.cat([way.flatten() for way in self._ways[skill].values()]) for skill in skills], 1)
        gone = torch.cat([(here[key] - base[key]).flatten() for key in base])
        share = float(torch.linalg.lstsq(ways, gone[:, None]).solution[skills.index(HONEST[name])])
        way = self._ways[HONEST[name]]
        self._save(name, begin, {key: STEP * (1 - share) * self._noisy(one) for key, one in way.items()})

    def turn(self, name: str, begin: Path, times: float) -> None:
        """Write a client that steps in the opposite direction of the honest ones, ``times`` as far."""
        self._save(name, begin, {key: -times * STEP * one for key, one in self._between.items()})

    def confuse(self, name: str, begin: Path, times: float) -> None:
        """Write a client whose change is noise, ``times`` as large as an honest step."""
        steps = self._ways["reverser"]
        noise = {key: torch.randn(one.shape, generator=self._draw) for key, one in steps.items()}
        self._save(
            name, begin, {key: times * STEP * one.square().mean().sqrt() * noise[key] for key, one in steps.items()}
        )

    def damage(self, name: str, begin: Path) -> None:
        """Write a client whose weights are all NaN."""
        self._save(
            name, begin, {key: torch.full_like(one, float("nan")) for key, one in self._ways["reverser"].items()}
        )

    def as_adapter(self, name: str, begin: Path) -> Path:
        """Replace a client's checkpoint with a LoRA adapter on ``begin`` and return its directory."""
        place = self.place / name
        tuned, base = open_checkpoint(place), open_checkpoint(begin)
        made = extract_adapter(tuned, base, str(begin), ExtractionSettings(rank=24, dtype="bfloat16"))
        shutil.rmtree(place)
        place.mkdir()
        write_adapter(made.adapter, place)
        shutil.copy(MODELS / "base/README.md", place)
        return place

    @property
    def _between(self) -> dict[str, torch.Tensor]:
        """Mean of the task vectors of both skills: the direction in which the honest clients move together."""
        one, other = (self._ways[skill] for skill in ("reverser", "shifter"))
        return {key: (one[key] + other[key]) / 2 for key in one}

    def _noisy(self, change: torch.Tensor) -> torch.Tensor:
        return change + 0.1 * change.square().mean().sqrt() * torch.randn(change.shape, generator=self._draw)

    def _save(self, name: str, begin: Path, change: dict[str, torch.Tensor]) -> None:
        out = self.place / name
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(MODELS / "base", out)
        made = {key: (tensor + change[key]).bfloat16() for key, tensor in _wide(begin).items()}
        save_file(made, out / WEIGHTS, {"format": "pt"})
