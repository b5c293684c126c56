"""The warm start as a stage: the cached policy of these settings, or a new one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task

from resources.environments.family import FamilyConfig
from resources.object_store import ObjectStore
from resources.policy.config import PolicyConfig
from tasks.warm_start.artifact import find_warm_start, warm_start_directory
from tasks.warm_start.config import WarmStartConfig
from tasks.warm_start.digest import warm_start_digest

PROGRESS_EVERY = 20
"""Steps between two lines of the log."""


@task(name="warm-start", tags=["pool:learner"])
def warm_start_policy(
    store_url: str,
    policy: PolicyConfig,
    families: dict[str, FamilyConfig],
    config: WarmStartConfig,
    seed: int,
    device: str = "cpu",
    threads: int = 1,
) -> dict[str, Any]:
    """Make sure that the store holds the warm start of these settings.

    Returns ``digest``, ``directory`` (a local Hugging Face directory on the learner's machine), and ``cached``.
    """
    store = ObjectStore.open(store_url)
    digest = warm_start_digest(policy, families, config, seed)
    logger = get_run_logger()
    cached = find_warm_start(store, digest) is not None
    if cached:
        logger.info("warm start %s is in the store", digest)
    else:
        # torch stays out of every process that only dispatches this stage.
        from tasks.warm_start.train import train_warm_start

        def progress(done: int, total: int, loss: float) -> None:
            if done % PROGRESS_EVERY == 0:
                logger.info("warm start: step %d of %d, loss %.3f", done, total, loss)

        report = train_warm_start(policy, families, config, seed, store, progress, device=device, threads=threads)
        logger.info("warm start %s took %.0f s, loss %.3f", digest, report.seconds, report.loss)
    download_to = Path(tempfile.gettempdir()) / "rollart-warm-starts"
    return {"digest": digest, "directory": str(warm_start_directory(store, digest, download_to)), "cached": cached}
