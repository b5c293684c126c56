"""What is a rollout worker made of? Its parts, from the tokenizer to the writer: how they are joined, run and closed.

They live on the worker's own event loop; the actor in worker.py starts that loop and hands calls over to it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from resources.environments.family import FamilyConfig
from resources.environments.processes import ChildProcesses
from resources.environments.registry import make_environment
from resources.environments.threads import DaemonThreads
from resources.environments.vector import StepTogether
from resources.object_store import ObjectStore
from resources.pools.actors import call
from resources.rewards.queue import RewardQueue
from resources.rewards.scorers import resolve_scorer
from resources.rollout.config import RolloutConfig
from resources.rollout.encoding_cache import EncodingCache
from resources.rollout.episode_services import EpisodeServices
from resources.rollout.handover import Handover, ScoreSubmitter
from resources.rollout.proxy import LLMProxy
from resources.rollout.stepping import BatchStepping, TrajectoryStepping
from resources.rollout.worker_loop import WorkerLoop
from resources.trajectories.store import TrajectoryWriter

Engines = Mapping[str, Sequence[tuple[str, Any]]]
"""By hardware class, (name, actor)."""


class WorkerParts:
    """Everything that lives on the worker's own loop. Made anywhere; the rest is called on that loop."""

    def __init__(
        self,
        worker_id: str,
        run_id: str,
        store: ObjectStore,
        queue: Any,
        engines: Engines,
        families: Mapping[str, FamilyConfig],
        config: RolloutConfig,
        *,
        fallback: Mapping[str, Sequence[str]],
        policy_directory: Path,
        context_length: int,
        stale_engines: Collection[str],
    ) -> None:
        self._worker_id, self._run_id, self._store, self._queue = worker_id, run_id, store, queue
        self._engines, self._families, self._config, self._fallback = engines, dict(families), config, fallback
        self._policy_directory, self._context_length = policy_directory, context_length
        self._stale_engines = stale_engines

    def open(self) -> None:
        """Build the parts; needs the running loop."""
        from resources.policy.chat_format import ChatFormat

        config = self._config
        chat = ChatFormat.from_directory(self._policy_directory)
        if config.history == "append":
            chat.check_appending()
        self._chat = EncodingCache(chat)
        self._writer = TrajectoryWriter(
            self._store, self._run_id, self._worker_id, seal_bytes=config.seal_bytes, seal_after_s=config.seal_after_s
        )
        self._submitter = ScoreSubmitter(RewardQueue(self._store, self._run_id).submit, config.score_window_s)
        scorers = {
            name: resolve_scorer(family.scorer, family.scorer_arguments) for name, family in self._families.items()
        }
        handover = Handover(self._families, scorers, self._writer, self._submitter)
        threads = DaemonThreads()
        self._worker_loop = WorkerLoop(
            self._worker_id, self._queue, self._families, config, handover, call=call, threads=threads
        )
        # Engines know proxies by id: a worker that is restarted under its old name must not meet its old requests.
        self._proxy = LLMProxy(
            f"{self._worker_id}-{secrets.token_hex(4)}",
            self._engines,
            config,
            call=call,
            fallback=self._fallback,
            stale_engines=self._stale_engines,
            log=self._worker_loop.log,
        )
        self._children = {
            name: ChildProcesses(name, family)
            for name, family in self._families.items()
            if family.executor == "process"
        }
        self._together = StepTogether() if config.stepping == "batch" else None
        self._services = EpisodeServices(
            chat=self._chat,
            proxy=self._proxy,
            make_environment=lambda name, family: make_environment(
                family,
                family=name,
                threads=threads,
                children=self._children.get(name),
                together=self._together,
            ),
            context_length=self._context_length,
            length_finish=config.length_finish,
            history=config.history,
            stepping=BatchStepping() if config.stepping == "batch" else TrajectoryStepping(),
            cross_policy=config.cross_policy if self._stale_engines else None,
            on_first_sampled=self._worker_loop.note_first_sampled,
            log=self._worker_loop.log,
            close_deadline_s=config.close_deadline_s,
        )

    async def run(self) -> None:
        try:
            await self._worker_loop.run(self._services)
        finally:
            for children in self._children.values():
                await children.close()
            await self._proxy.close()
            await self._submitter.close()
            await self._writer.close()

    def stop(self) -> None:
        self._worker_loop.stop()

    async def set_engines(self, engines: Engines) -> None:
        self._proxy.set_engines(engines)

    async def health(self) -> dict[str, Any]:
        return {"worn_out": self._worker_loop.worn_out, "suspects": self._proxy.take_suspects()}

    async def stats(self) -> dict[str, Any]:
        return {
            "worker_id": self._worker_id,
            **self._worker_loop.stats(),
            "encoding_cache": {"hits": self._chat.num_hits, "misses": self._chat.num_misses},
            "proxy": self._proxy.stats(),
        }
