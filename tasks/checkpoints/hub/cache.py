"""Locate the files of a repository in the Hub's own cache."""

from __future__ import annotations

from pathlib import Path


def snapshots_directory(repo: str) -> Path:
    """Return the parent directory of the commits of ``org/name``. It may not exist."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "snapshots"
