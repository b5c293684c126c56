"""A run's folder in the object store: id, configuration, iteration manifests, and what a resume starts from."""

from __future__ import annotations

import datetime
import re
import secrets
from typing import Any

from pydantic import BaseModel, ConfigDict

from resources.object_store import ObjectStore

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


class RunRef(BaseModel):
    """What a stage needs to find a run: small enough to travel with every task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    store_url: str
    service: str | None = None
    """Id under which the actors that serve this are registered; None: the run's own. An evaluation beside a living run
    has actors of its own, and its trajectories must not meet the run's."""

    @property
    def service_id(self) -> str:
        return self.service or self.run_id

    def service_folder(self) -> ObjectStore:
        """The folder of what its actors play and score: the run's own, unless they serve something beside it."""
        return self.root().sub(f"runs/{self.service_id}")

    def beside(self, purpose: str) -> RunRef:
        """The same run's folder, served by other actors."""
        return self.model_copy(update={"service": f"{self.run_id}-{purpose}-{secrets.token_hex(2)}"})

    def root(self) -> ObjectStore:
        """The store that holds all runs."""
        return ObjectStore.open(self.store_url)

    def folder(self) -> ObjectStore:
        """This run's own folder."""
        return self.root().sub(f"runs/{self.run_id}")


def check_name(name: str) -> None:
    """Raises ValueError when the name of a run would not do as a folder name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"name is {name!r}; allowed are 1 to 40 of a-z, 0-9 and '-', starting with a letter or digit")


def new_run_id(name: str) -> str:
    """``<name>-<UTC time>-<random>``: sortable, and distinct for two runs that start in one second.

    Raises ValueError when the name would not do as a folder name.
    """
    check_name(name)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return f"{name}-{now}-{secrets.token_hex(2)}"


def create_run(run: RunRef, config: dict[str, Any]) -> None:
    """Write the run's configuration and point ``latest_run`` at it."""
    run.folder().put_json("config.json", config)
    run.root().put_json("latest_run.json", {"run_id": run.run_id})


def find_run(store_url: str, run_id: str) -> RunRef:
    """The run of this id, or the newest one for ``latest``. Raises ValueError when it is not in the store."""
    root = ObjectStore.open(store_url)
    if run_id == "latest":
        if not root.exists("latest_run.json"):
            raise ValueError(f"the store {store_url} holds no run yet; train one first, or name another store")
        run_id = root.get_json("latest_run.json")["run_id"]
    run = RunRef(run_id=run_id, store_url=store_url)
    if not run.folder().exists("config.json"):
        known = sorted({key.split("/")[1] for key in root.list("runs/") if key.endswith("/config.json")})[-5:]
        raise ValueError(f"run {run_id!r} is not in the store {store_url}; its newest runs are {known}")
    return run


def evaluation_key(version: int) -> str:
    return f"evaluations/{version:06d}.json"


def iteration_key(iteration: int) -> str:
    return f"iterations/{iteration:06d}.json"


def write_iteration(run: RunRef, iteration: int, record: dict[str, Any]) -> None:
    """The iteration's manifest. It is written last: what it names is in place, so a resume may start from it."""
    run.folder().put_json(iteration_key(iteration), record)


def iterations(run: RunRef) -> list[int]:
    """Numbers of the completed iterations, ascending (iteration v turns version v into v + 1)."""
    return [int(key.rsplit("/", 1)[1].removesuffix(".json")) for key in run.folder().list("iterations/")]


def read_iteration(run: RunRef, iteration: int) -> dict[str, Any]:
    return run.folder().get_json(iteration_key(iteration))


def checkpoint_prefix(version: int) -> str:
    """Where the learner's checkpoint of a version lies in the run's folder."""
    return f"checkpoints/v{version:06d}"


def checkpoint_versions(run: RunRef) -> list[int]:
    """Versions of the complete checkpoints, ascending (``state.json`` is written last)."""
    keys = [key.split("/") for key in run.folder().list("checkpoints/")]
    return sorted(int(key[1].removeprefix("v")) for key in keys if key[2:] == ["state.json"])


def claim_resume(run: RunRef, number: int) -> bool:
    """Take the run's ``number``-th life, from 1; False when somebody else has taken it. At most one of two drivers that
    found the run unused at the same time gets it."""
    return run.folder().create(f"resumes/{number:06d}.json", b"{}")


def num_resumes(run: RunRef) -> int:
    """How often the run was resumed."""
    return len(run.folder().list("resumes/"))


def prune_checkpoints(run: RunRef, keep: int, protected: set[int]) -> list[int]:
    """Drop all checkpoints but the newest ``keep`` and the ``protected`` ones; returns the versions dropped."""
    folder = run.folder()
    keys: dict[int, list[str]] = {}
    for key in folder.list("checkpoints/"):
        keys.setdefault(int(key.split("/")[1].removeprefix("v")), []).append(key)
    dropped = sorted(set(sorted(keys)[:-keep]) - protected)
    for version in dropped:
        for key in keys[version]:
            folder.delete(key)
        # On a local store a folder outlives its files, and each would be listed in every iteration to come.
        local = folder.local_path(checkpoint_prefix(version))
        if local is not None and local.is_dir() and not any(local.iterdir()):
            local.rmdir()
    return dropped


class ResumePoint(BaseModel):
    """Where a run goes on: the version that engines and learner hold, and the group queue's state."""

    model_config = ConfigDict(frozen=True)

    version: int
    queue_state: dict[str, Any]


def resume_point(run: RunRef) -> ResumePoint | None:
    """From the newest iteration manifest; None when no iteration was completed (the run then starts from version 0)."""
    done = iterations(run)
    if not done:
        return None
    record = read_iteration(run, done[-1])
    return ResumePoint(version=record["version"], queue_state=record["queue_state"])
