"""An embedded cluster with real worker processes: actors, registry, pre-flight, losses."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest
from distributed import Client

from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.hardware import HardwareClass, PoolsConfig
from resources.pools.actors import call, call_sync
from resources.pools.cluster import attach, embedded_cluster, open_pools
from resources.pools.liveness import LossWatch
from resources.pools.placement import release_actor, start_actor, workers_by_class
from resources.pools.preflight import check_pools
from resources.pools.registry import RunActors, lookup, lookup_sync, publish, withdraw
from tests.integration.pool_actors import (
    BrokenConstructor,
    Caller,
    Counter,
    HangingConstructor,
    add_from_task,
    run_of,
    worker_name,
)

CONFIG = PoolsConfig(
    classes={
        "compute": HardwareClass(role="engine", num_workers=1, fallback=("bandwidth",)),
        "bandwidth": HardwareClass(role="engine", num_workers=0, fallback=("compute",)),
        "learner": HardwareClass(role="learner"),
        "cpu": HardwareClass(role="environment", num_workers=0, fallback=()),
        "control": HardwareClass(role="control", num_workers=0),
    },
    start_timeout_s=30,
)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with embedded_cluster(CONFIG, env={"POOLS_TEST": "here"}) as client:
        yield client


def test_workers_carry_their_class_name_and_environment(client: Client) -> None:
    by_class = workers_by_class(client)
    assert sorted(by_class) == ["compute", "learner"]
    assert client.submit(worker_name, resources={"compute": 1}, pure=False).result(10) == "compute-0"
    assert client.submit(worker_name, resources={"learner": 1}, pure=False).result(10) == "learner-0"
    environment = client.submit(dict, os.environ, workers=by_class["compute"]).result(10)
    assert environment is not None
    seen = client.submit(os.getenv, "POOLS_TEST", workers=by_class["compute"]).result(10)
    threads = client.submit(os.getenv, "OMP_NUM_THREADS", workers=by_class["compute"]).result(10)
    policy = client.submit(os.getenv, "OMP_WAIT_POLICY", workers=by_class["compute"]).result(10)
    assert (seen, threads, policy) == ("here", "1", "PASSIVE")


def test_actors_answer_drivers_tasks_and_each_other(client: Client) -> None:
    workers = workers_by_class(client)
    counter = start_actor(client, Counter, 10, worker=workers["compute"][0], name="counter")
    near = start_actor(client, Caller, counter, worker=workers["compute"][0], name="near")
    far = start_actor(client, Caller, counter, worker=workers["learner"][0], name="far")

    async def from_driver_loop() -> list[int]:
        return [await call(counter, "add", 1), await call(counter, "add_in_thread", 1)]

    assert asyncio.run(from_driver_loop()) == [11, 12]
    assert call_sync(counter, "add", 1, timeout_s=10) == 13
    assert client.submit(add_from_task, counter, 1, workers=workers["compute"], pure=False).result(10) == 14
    assert client.submit(add_from_task, counter, 1, workers=workers["learner"], pure=False).result(10) == 15
    for caller, expected in ((near, 16), (far, 18)):
        assert call_sync(caller, "relay", 1, timeout_s=10) == expected
        assert call_sync(caller, "relay_from_own_loop", 1, timeout_s=10) == expected + 1


def test_deadlines_and_the_methods_own_errors_are_told_apart(client: Client) -> None:
    counter = start_actor(client, Counter, worker=workers_by_class(client)["compute"][0], name="counter")
    with pytest.raises(DeadlineExceeded, match=r"actor counter .* did not answer wait\(\) within 0.2 s"):
        call_sync(counter, "wait", 5.0, timeout_s=0.2)
    with pytest.raises(TimeoutError, match="the method's own"):
        call_sync(counter, "fail", timeout_s=5)
    assert call_sync(counter, "add", 2, timeout_s=5) == 2


def test_constructors_fail_aloud(client: Client) -> None:
    worker = workers_by_class(client)["compute"][0]
    with pytest.raises(ValueError, match="no such model directory"):
        start_actor(client, BrokenConstructor, worker=worker, name="broken")
    with pytest.raises(DeadlineExceeded, match=r"actor hanging .* was not built within 0.3 s"):
        start_actor(client, HangingConstructor, worker=worker, name="hanging", timeout_s=0.3)
    with pytest.raises(InfrastructureFailure, match=r"no worker at tcp://127\.0\.0\.1:9"):
        start_actor(client, Counter, worker="tcp://127.0.0.1:9", name="lost")


def test_a_released_actor_is_gone(client: Client) -> None:
    counter = start_actor(client, Counter, worker=workers_by_class(client)["compute"][0], name="counter")
    release_actor(counter)
    deadline = time.monotonic() + 5
    with pytest.raises(InfrastructureFailure, match=r"actor counter .* is gone"):
        while time.monotonic() < deadline:
            call_sync(counter, "add", 1, timeout_s=5)
            time.sleep(0.05)


def test_two_runs_on_one_cluster_find_their_own_actors(client: Client) -> None:
    worker = workers_by_class(client)["compute"][0]
    address = str(client.scheduler.address)
    with attach(address) as other:
        runs = {}
        for owner, run_id in ((client, "run-a"), (other, "run-b")):
            queue = start_actor(owner, Counter, worker=worker, name=f"queue-{run_id}")
            runs[run_id] = RunActors(run_id, {"compute": (queue,)}, learner=queue, queue=queue)
            publish(owner, runs[run_id])
        for run_id in runs:
            assert client.submit(run_of, run_id, workers=[worker], pure=False).result(10) == f"queue-{run_id}"
            assert asyncio.run(lookup(run_id, scheduler=address)) == runs[run_id]
        with pytest.raises(InfrastructureFailure, match="run run-a is already running"):
            publish(other, runs["run-a"])
        withdraw(client, "run-a")
        with pytest.raises(InfrastructureFailure, match="knows no run run-a"):
            lookup_sync("run-a", scheduler=address)
        assert lookup_sync("run-b", scheduler=address).queue.name == "queue-run-b"
    # The driver of run-b is gone without a word: its actors go with it, its entry with the next publication.
    deadline = time.monotonic() + 10
    while "rollart-run/run-b" in client.list_datasets() and time.monotonic() < deadline:
        publish(client, runs["run-a"], replace=True)
        time.sleep(0.1)
    assert client.list_datasets() == ("rollart-run/run-a",)
    withdraw(client, "run-a")


def test_missing_classes_fall_back_or_are_an_error(client: Client) -> None:
    lacking = CONFIG.model_copy(update={"start_timeout_s": 0.3})
    with pytest.raises(InfrastructureFailure, match=r"hardware class cpu \(fallback: none\); control"):
        check_pools(client, lacking)
    classes = dict(CONFIG.classes)
    classes["cpu"] = HardwareClass(role="environment", num_workers=0)
    there = {name: each for name, each in classes.items() if name not in ("cpu", "control")}
    serving = check_pools(client, CONFIG.model_copy(update={"classes": there}))
    assert serving.serving == {"compute": "compute", "bandwidth": "compute", "learner": "learner"}
    assert serving.num_fallbacks == 1
    assert serving.workers_of("bandwidth") == tuple(workers_by_class(client)["compute"])


def test_loss_of_a_worker_is_told_within_five_seconds(client: Client) -> None:
    """S6, for the actors that a run owns."""
    worker = workers_by_class(client)["learner"][0]
    victim = start_actor(client, Counter, worker=worker, name="learner")
    survivor = start_actor(client, Counter, worker=workers_by_class(client)["compute"][0], name="engine")
    told: list[str] = []
    with LossWatch([victim, survivor], lambda handle, reason: told.append(reason), poll_s=0.5) as watch:
        watch.raise_if_lost()
        os.kill(call_sync(victim, "pid", timeout_s=5), signal.SIGKILL)
        started = time.monotonic()
        while not watch.lost and time.monotonic() - started < 5:
            time.sleep(0.02)
    assert told == [f"actor learner (Counter on {worker}) was lost: its worker is gone"]
    with pytest.raises(InfrastructureFailure, match="actor learner"):
        watch.raise_if_lost()
    started = time.monotonic()
    with pytest.raises(InfrastructureFailure, match="actor learner"):
        call_sync(victim, "add", 1, timeout_s=20)
    assert time.monotonic() - started < 5
    assert call_sync(survivor, "add", 1, timeout_s=5) == 1


def test_a_call_under_way_fails_when_its_worker_dies(client: Client) -> None:
    deadline = time.monotonic() + 20
    while "learner" not in workers_by_class(client):  # its nanny starts a new one
        assert time.monotonic() < deadline
        time.sleep(0.1)
    victim = start_actor(client, Counter, worker=workers_by_class(client)["learner"][0], name="learner")
    pid = call_sync(victim, "pid", timeout_s=5)

    async def play() -> None:
        waiting = asyncio.ensure_future(call(victim, "wait", 60.0))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(waiting, 5)

    with pytest.raises(InfrastructureFailure, match=r"was lost during wait\(\)"):
        asyncio.run(play())


def test_a_scheduler_that_is_not_there_is_named() -> None:
    with pytest.raises(InfrastructureFailure, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"):
        attach("tcp://127.0.0.1:9", timeout_s=0.5).__enter__()


def test_a_worker_that_cannot_start_says_why() -> None:
    with pytest.raises(InfrastructureFailure, match="No module named 'no_such_module'"):
        open_pools(CONFIG, preload_modules=["no_such_module"]).__enter__()
