"""A run's folder between iterations: what stays, and what goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from resources.object_store import ObjectStore
from resources.runs import RunRef, checkpoint_prefix, prune_checkpoints


@pytest.fixture
def run(tmp_path: Path) -> RunRef:
    run = RunRef(run_id="run", store_url=str(ObjectStore.open(str(tmp_path / "store")).url))
    for version in range(5):
        for name in ("state.json", "tensors.safetensors"):
            run.folder().put(f"{checkpoint_prefix(version)}/{name}", b"x")
    return run


def kept(run: RunRef) -> list[str]:
    folder = run.folder().local_path("checkpoints")
    assert folder is not None
    return sorted(path.name for path in folder.iterdir())


def test_old_checkpoints_leave_nothing_behind(run: RunRef) -> None:
    """A folder left behind by every version would be listed in every later iteration."""
    assert prune_checkpoints(run, 2, {1, 4}) == [0, 2]
    assert kept(run) == ["v000001", "v000003", "v000004"]
    assert prune_checkpoints(run, 2, {4}) == [1]
    assert prune_checkpoints(run, 2, {4}) == []
    assert kept(run) == ["v000003", "v000004"]


def test_the_version_a_resume_needs_outlives_newer_ones(run: RunRef) -> None:
    """The next iteration may have published two versions more before this one is recorded."""
    assert prune_checkpoints(run, 1, {2}) == [0, 1, 3]
    assert kept(run) == ["v000002", "v000004"]
