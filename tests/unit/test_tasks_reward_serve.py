from __future__ import annotations

import threading
import time

import pytest

from resources.environments.family import FamilyConfig
from resources.object_store import ObjectStore
from resources.rewards.base import ScoringRequest
from resources.rewards.config import RewardsConfig
from resources.rewards.elastic_pool import elastic_pool
from resources.rewards.queue import RewardQueue
from resources.rewards.results import RewardResults
from resources.rewards.scorers import resolve_scorer
from resources.rewards.scorers.arguments import write_scorer_arguments
from tasks.reward.serve import serve

CONFIG = RewardsConfig(
    keep_alive_s=60.0, heartbeat_s=0.05, idle_poll_s=0.05, autoscale_period_s=0.02, target_backlog_per_replica=4
)
PATIENCE_S = 60.0


def test_a_run_that_the_store_does_not_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"store file://.* holds no run 'no-such-run' .*under the same url"):
        serve(str(tmp_path), "no-such-run", CONFIG)


def test_the_pool_grows_with_the_backlog_and_ends_with_the_run(tmp_path):
    """From 0 to max_replicas and back to 0, with replicas in threads; every request is answered once."""
    store = ObjectStore.open(tmp_path)
    plain = FamilyConfig(environment="calculator", hardware_class="compute", scorer="exact_answer")
    capitals = plain.model_copy(update={"scorer_arguments": {"ignore_case": True}})
    write_scorer_arguments(store, "run", {"capitals": capitals, "plain": plain})
    version = resolve_scorer("exact_answer", capitals.scorer_arguments).version
    queue, results = RewardQueue(store, "run"), RewardResults(store, "run")
    ids = {
        queue.submit([
            ScoringRequest(f"run/{i}", "capitals", "exact_answer", version, {"answer": "PARIS", "expected": "paris"}),
            ScoringRequest(f"run/plain-{i}", "plain", "exact_answer", "1", {"answer": "PARIS", "expected": "paris"}),
        ])
        for i in range(10)
    }  # fmt: skip
    replicas: list[threading.Thread] = []
    reports: list[dict] = []

    def launch(num_replicas: int) -> None:
        for _ in range(num_replicas):
            thread = threading.Thread(target=lambda: reports.append(serve(str(tmp_path), "run", CONFIG)))
            replicas.append(thread)
            thread.start()

    seen: set[str] = set()
    rewards: dict[str, float | None] = {}
    end = time.monotonic() + PATIENCE_S
    with elastic_pool(store, "run", CONFIG, launch) as pool:
        while seen != ids or pool.num_replicas != CONFIG.max_replicas:
            assert time.monotonic() < end, f"{len(seen)} of {len(ids)} batches, {pool.num_replicas} replicas"
            for _, scores in results.read_new(seen):
                assert not {s.trajectory_id for s in scores} & rewards.keys()
                rewards |= {s.trajectory_id: s.reward for s in scores}
            time.sleep(0.01)
        assert pool.last_error is None
    for thread in replicas:
        thread.join(timeout=PATIENCE_S)
    assert rewards == {f"run/{i}": 1.0 for i in range(10)} | {f"run/plain-{i}": 0.0 for i in range(10)}
    assert [report["end_reason"] for report in reports] == ["run_ended"] * CONFIG.max_replicas
    assert max(sample.num_running for sample in pool.history()) == CONFIG.max_replicas
