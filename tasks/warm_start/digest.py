"""The cache key of a warm start: everything that changes its outcome, and nothing that does not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from resources.environments.family import FamilyConfig
from resources.environments.registry import instantiate
from resources.policy.config import PolicyConfig
from tasks.warm_start.config import WarmStartConfig

CODE_VERSION = "2"
"""Raise it when a change of this stage, of the packing or of the chat format changes what the same settings give.
Environments carry versions of their own."""


def warm_start_digest(
    policy: PolicyConfig,
    families: Mapping[str, FamilyConfig],
    config: WarmStartConfig,
    seed: int,
    code_version: str = CODE_VERSION,
) -> str:
    """16 hexadecimal digits. Where a family runs, how it is scored and how many groups RL takes of it do not count.

    Raises:
        ValueError: an environment that cannot be made, or a model directory that cannot be read.
    """
    content = {
        "code_version": code_version,
        "seed": seed,
        "policy": policy.model_dump(mode="json", exclude={"model_directory"}),
        "model": None if policy.model_directory is None else directory_digest(Path(policy.model_directory)),
        "warm_start": config.model_dump(mode="json", exclude={"episodes_per_step", "p_random"}),
        "families": {
            name: {
                "environment": family.environment,
                "arguments": family.arguments,
                "env_version": instantiate(family).env_version,
                "episodes_per_step": config.episodes_of(name),
                "p_random": config.noise_of(name),
            }
            for name, family in families.items()
        },
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def directory_digest(directory: Path) -> str:
    """SHA-256 over names and bytes of the files of a model directory. Raises ValueError when it is none."""
    if not directory.is_dir():
        raise ValueError(f"policy.model_directory: {directory} does not exist; name a Hugging Face model directory")
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(f"{path.name}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
