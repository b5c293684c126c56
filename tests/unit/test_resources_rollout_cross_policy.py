"""Cross-policy sampling: which turns are stale engines', who serves them, how old they may be, and that what is
recorded of each is exact."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from resources.engines.actor import EngineActor
from resources.engines.config import EngineConfig
from resources.environments.family import FamilyConfig
from resources.environments.seeds import sampling_seed
from resources.failures import EngineFailure
from resources.object_store import ObjectStore
from resources.policy.config import PolicyConfig
from resources.policy.tiny import create_tiny_policy
from resources.rollout.config import RolloutConfig
from resources.rollout.cross_policy import CrossPolicyConfig, stale_members
from resources.rollout.gate_events import BatchRequested, FirstSampled, VersionLoaded
from resources.rollout.group_queue import GroupQueue
from resources.rollout.worker import RolloutWorker
from resources.trajectories.store import read_trajectories
from resources.weights.store import WeightStore
from tasks.rollout.batch_metrics import batch_metrics
from tests.gate_driver import Driver, done, family
from tests.model_directories import full_recompute
from tests.unit.test_resources_rollout_env_manager import Stage
from tests.unit.test_resources_rollout_in_process import CORPUS, RUN, HeldQueue, OnLoop
from tests.unit.test_resources_rollout_proxy import Bench, ScriptedEngine, play, request

# -- which turns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p_stale", [0.1, 0.5, 1.0])
def test_turns_are_drawn_at_the_rate_asked_for(p_stale: float) -> None:
    """Within five standard deviations over 20,000 turns; turns of one trajectory are independent of each other."""
    cross_policy = CrossPolicyConfig(p_stale=p_stale, refresh_every=2)
    draws = np.array(
        [[cross_policy.is_stale_turn(sampling_seed(3, "a", m, 0), t) for t in range(8)] for m in range(2500)]
    )
    deviation = math.sqrt(p_stale * (1 - p_stale) / draws.size)
    assert abs(draws.mean() - p_stale) <= 5 * deviation
    both = (draws[:, :-1] & draws[:, 1:]).mean()
    assert abs(both - p_stale**2) <= 5 * math.sqrt(p_stale**2 * (1 - p_stale**2) / draws[:, 1:].size) + 1e-12


def test_a_draw_follows_from_the_run_s_seed_the_member_and_the_turn_alone() -> None:
    """Written down once: any process, in any order, at any time draws the same. Every attempt draws anew."""
    cross_policy = CrossPolicyConfig(p_stale=0.5, refresh_every=4)

    def turns(*of: int) -> str:
        run_seed, member, attempt = of
        seed = sampling_seed(run_seed, "maze-000000", member, attempt)
        drawn = {turn: cross_policy.is_stale_turn(seed, turn) for turn in reversed(range(16))}
        return "".join("s" if drawn[turn] else "." for turn in range(16))

    assert turns(1, 0, 0) == "sss.s..s.s.ss..s"
    assert len({turns(1, 0, 0), turns(2, 0, 0), turns(1, 1, 0), turns(1, 0, 1)}) == 4


def test_the_last_engines_of_a_class_are_stale_and_one_stays_current() -> None:
    two = CrossPolicyConfig(p_stale=0.5, refresh_every=2, stale_engines=2)
    assert list(stale_members(two, "compute", range(3))) == [1, 2]
    assert list(stale_members(None, "compute", range(1))) == []
    with pytest.raises(
        ValueError, match="stale_engines is 2, .*'compute'.* has 2 engines: .* give the class 3 workers"
    ):
        stale_members(two, "compute", range(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline": "synchronous", "max_staleness": 0}, r"rollout.pipeline is 'synchronous'.*max_staleness is 0"),
        ({"pipeline": "one_off"}, "rollout.pipeline is 'one_off'"),
        ({"deterministic": True}, "rollout.deterministic is true"),
    ],
)
def test_where_a_batch_has_one_version_there_are_no_stale_turns(changes, message: str) -> None:
    with pytest.raises(ValidationError, match=message + ".*set rollout.cross_policy to null"):
        RolloutConfig(cross_policy=CrossPolicyConfig(p_stale=0.5, refresh_every=2), **changes)


def test_the_bound_grows_by_what_a_stale_engine_can_be_behind() -> None:
    assert RolloutConfig(max_staleness=2).lag_bound == 2
    for refresh_every, bound in ((1, 2), (4, 5)):
        cross_policy = CrossPolicyConfig(p_stale=0.5, refresh_every=refresh_every)
        assert RolloutConfig(max_staleness=2, cross_policy=cross_policy).lag_bound == bound


# -- who serves them ---------------------------------------------------------------------------------------------------


def test_each_request_goes_to_an_engine_of_its_kind_and_each_keeps_its_prefix() -> None:
    async def main():
        current, stale = ScriptedEngine("c", version=5, capacity=1), ScriptedEngine("s", version=4, capacity=99)
        bench = Bench({"x": [("c", current), ("s", stale)]}, stale_engines=["s"])
        for number, policy in enumerate(["current", "stale", "stale", "current"]):
            generation = await bench.proxy.generate(request(number, trajectory="t", policy=policy), "x")
            assert set(generation.versions.tolist()) == ({4} if policy == "stale" else {5})
            assert generation.stale_tokens == (4 if policy == "stale" else 0)
            assert bench.proxy.engine_of("t") == ("s" if policy == "stale" else "c")
        assert [len(engine.requests) for engine in (current, stale)] == [2, 2]
        bench.proxy.release("t")
        await asyncio.sleep(0.1)
        for engine in (current, stale):
            assert [releases for _, _, releases, _ in engine.exchanges if releases] == [["t"]], "both forget it"
        await bench.proxy.close()

    play(main)


def test_a_lost_stale_engine_s_turns_go_to_a_current_one_and_are_counted() -> None:
    async def main():
        current, stale = ScriptedEngine("c", version=5), ScriptedEngine("s", version=4)
        stale.lost = True
        bench = Bench({"x": [("c", current), ("s", stale)]}, stale_engines=["s"], engine_cooldown_s=1000.0)
        for number in range(3):
            generation = await bench.proxy.generate(request(number, policy="stale"), "x")
            assert (generation.engine, generation.stale_tokens) == ("c", 0)
        assert bench.proxy.stats()["num_stale_unserved"] == 3
        assert bench.lines == ["no usable stale engine of class 'x': its turns go to current engines"]
        assert bench.proxy.stats()["num_fallbacks"] == {}
        await bench.proxy.close()

    play(main)


def test_a_stale_engine_that_fails_half_way_hands_over_what_it_sampled() -> None:
    async def main():
        current, stale = ScriptedEngine("c", version=5), ScriptedEngine("s", version=4, cut_after=3)
        bench = Bench({"x": [("c", current), ("s", stale)]}, stale_engines=["s"])
        generation = await bench.proxy.generate(request(new_tokens=8, policy="stale"), "x")
        assert generation.versions.tolist() == [4] * 3 + [5] * 5
        assert generation.stale_tokens == 3
        assert bench.proxy.stats()["num_stale_unserved"] == 1
        await bench.proxy.close()

    play(main)


def test_no_other_request_ever_reaches_a_stale_engine() -> None:
    """Evaluation measures the current version: rather than another one it waits, and fails."""

    async def main():
        current, stale, other = ScriptedEngine("c"), ScriptedEngine("s"), ScriptedEngine("o")
        current.lost = True
        quick = {"engine_wait_s": 0.05, "engine_cooldown_s": 1000.0}
        bench = Bench({"x": [("c", current), ("s", stale)]}, stale_engines=["s"], **quick)
        with pytest.raises(EngineFailure, match="no engine of class 'x'"):
            await bench.proxy.generate(request(), "x")
        await bench.proxy.close()
        engines = {"x": [("c", current), ("s", stale)], "y": [("o", other)]}
        bench = Bench(engines, {"x": ["y"]}, stale_engines=["s"], **quick)
        assert (await bench.proxy.generate(request(), "x")).engine == "o"
        assert not stale.requests
        await bench.proxy.close()

    play(main)


def test_turns_ask_for_their_policy_and_report_every_older_version() -> None:
    """Versions 3, 1, 2 and 0 in turn: the gate hears of 3, of 1 and of 0."""
    turns = [("a", "stop", 3), ("b", "stop", 1), ("c", "stop", 2), ("win", "stop", 0)]
    stage = Stage(*turns, cross_policy=CrossPolicyConfig(p_stale=0.5, refresh_every=4))
    trajectory = stage.play()
    asked = [each.policy for each in stage.generator.requests]
    drawn = [stage.services.cross_policy.is_stale_turn(22, turn) for turn in range(4)]
    assert asked == ["stale" if is_stale else "current" for is_stale in drawn] and len(set(asked)) == 2
    assert stage.sampled == [("run/echo-000000/0/0", version) for version in (3, 1, 0)]
    assert trajectory.oldest_version == 0
    counts = stage.manager.policy_counts
    assert (counts.stale_turns, counts.unserved_turns, counts.moved_turns) == (0, sum(drawn), 0)


def test_evaluation_takes_current_engines() -> None:
    stage = Stage(("win", "stop", 3), split="eval", cross_policy=CrossPolicyConfig(p_stale=1.0, refresh_every=2))
    stage.play()
    assert [each.policy for each in stage.generator.requests] == ["current"]


# -- how old they may be -----------------------------------------------------------------------------------------------


def test_the_bound_is_reached_and_never_passed() -> None:
    """alpha 1, every third version: while 2 is served a stale engine holds 0. What it samples may be in batch 3, the
    last that admission lets start then, at lag 3; in no batch after it."""
    cross_policy = CrossPolicyConfig(p_stale=0.5, refresh_every=3)
    driver = Driver({"a": family(1)}, state={"version": 2}, max_staleness=1, cross_policy=cross_policy)
    first, other_first, late, other_late = driver.take_starts()  # two groups: one for batch 2, one for batch 3
    driver(done(first, 1.0, 2))
    driver(done(other_first, 0.0, 2))
    driver(BatchRequested(2))
    driver(FirstSampled(late.trajectory_id, 2))
    driver(FirstSampled(late.trajectory_id, 0))
    driver(VersionLoaded(3))
    assert not driver.cancels
    driver(done(late, 1.0, 0))
    driver(done(other_late, 0.0, 2))
    driver(BatchRequested(3))
    assert [batch.version for batch in driver.batches] == [2, 3]
    assert driver.batches[1].counters["lag_max/a"] == driver.gate.config.lag_bound == 3

    unlucky = driver.take_starts()[0]
    driver(FirstSampled(unlucky.trajectory_id, 1))
    driver(VersionLoaded(4))
    assert not driver.cancels, "batch 4 may still train it"
    driver(FirstSampled(unlucky.trajectory_id, 0))
    assert {cancel.termination for cancel in driver.cancels} == {"evicted_stale"}


# -- exactness, in the real plane --------------------------------------------------------------------------------------

EVERY = 3


def publish(store: ObjectStore, policy: Path, version: int) -> None:
    """Versions far enough apart to be told from each other by any log-probability."""
    untrained = load_file(policy / "model.safetensors")
    tensors = {name: tensor * (1.0 + 0.2 * version) for name, tensor in untrained.items()}
    files = {path.name: path.read_bytes() for path in policy.iterdir() if path.suffix in (".json", ".jinja")}
    WeightStore(store, RUN).publish(version, tensors, files=files)


async def play_batches(store: ObjectStore, policy: Path, config: RolloutConfig, number: int):
    """Two engines of one class, of which the second loads every third version; ``number`` batches."""
    publish(store, policy, 0)
    loop = asyncio.get_running_loop()
    names = ("current", "stale")
    engines = {name: EngineActor(store.url, RUN, 0, EngineConfig(num_slots=8), "compute", name) for name in names}
    families = {
        "guess": FamilyConfig(
            environment="guess_number", hardware_class="compute", groups_per_iteration=3, group_size=4, max_new_tokens=3
        )
    }
    queue = GroupQueue(RUN, store.url, families, config, seed=7)
    handles = {"compute": [(name, OnLoop(engine, loop)) for name, engine in engines.items()]}
    held = HeldQueue(queue)
    worker = await asyncio.to_thread(
        RolloutWorker, "w", RUN, store.url, OnLoop(held, loop), handles, families, config, stale_engines=("stale",)
    )
    held.opened.set()
    batches = []
    try:
        for version in range(number):
            batches.append(await queue.collect(version, 60.0))
            publish(store, policy, version + 1)
            await asyncio.sleep(0.1)  # rollouts go on under the old weights
            loading = [engines["current"], *([engines["stale"]] if (version + 1) % EVERY == 0 else [])]
            for engine in loading:
                await engine.suspend()
            for engine in loading:
                await engine.load(version + 1)
            await queue.version_loaded(version + 1)
            for engine in loading:
                await engine.resume()
        evaluation = await queue.evaluate({"guess": 3}, seed=1, evaluate_timeout_s=60.0, greedy=False)
        return batches, evaluation, await worker.stats()
    finally:
        await queue.close()
        await worker.close()
        for engine in engines.values():
            await engine.close()


def test_every_token_s_logprob_is_that_of_the_version_it_names(tmp_path: Path) -> None:
    """Turns of one trajectory on two engines of different weights: recomputed under each token's own version the
    log-probabilities agree, under any other they do not; lags stay within the bound, and shares are counted."""
    sizes = PolicyConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64)
    policy = create_tiny_policy(tmp_path / "policy", sizes, CORPUS, seed=0)
    store = ObjectStore.open(str(tmp_path / "store"))
    config = RolloutConfig(
        max_staleness=1, cross_policy=CrossPolicyConfig(p_stale=0.5, refresh_every=EVERY), seal_after_s=0.05,
        length_finish="step", loop_block_after_s=60.0, loop_block_limit_s=120.0,  # a busy machine blocks nobody's loop
    )  # fmt: skip
    batches, evaluation, stats = asyncio.run(play_batches(store, policy, config, 5))
    weights = {
        version: {
            name: tensor * (1.0 + 0.2 * version) for name, tensor in load_file(policy / "model.safetensors").items()
        }
        for version in range(6)
    }
    lags, num_mixed, stale_turns, num_turns = set(), 0, 0, 0
    for batch in batches:
        members = [member for group in batch.groups for member in group.members]
        of_batch, of_stale = 0, 0
        for index, row in enumerate(read_trajectories(store, [member.ref for member in members])):
            versions = np.unique(row.token_versions[row.loss_mask]).tolist()
            lags |= {batch.version - version for version in versions}
            num_mixed += len({turn.engine for turn in row.turns}) == 2
            of_batch += len(row.turns)
            for number, turn in enumerate(row.turns):
                is_stale = config.cross_policy.is_stale_turn(row.seed_sampling, number)
                assert turn.engine == ("stale" if is_stale else "current"), "the engine that was drawn"
                of_stale += is_stale
                if is_stale:
                    assert not (row.token_versions[turn.action_start : turn.action_end] % EVERY).any()
            if index % 6 == 0:
                check_logprobs(policy, weights, row, versions)
        shares = batch_metrics(batch)
        assert shares["cross_policy.stale_turns"] == shares["cross_policy.stale_turns/guess"] == of_stale
        assert shares["cross_policy/turn_share"] == pytest.approx(of_stale / of_batch)
        assert shares["cross_policy.unserved_turns"] == 0
        assert shares["cross_policy.moved_turns"] > 0 and shares["cross_policy.prefilled_again_tokens"] > 0
        stale_turns, num_turns = stale_turns + of_stale, num_turns + of_batch
    assert num_mixed > 10 and 0.35 < stale_turns / num_turns < 0.65
    assert max(lags) > config.max_staleness, "some tokens are older than a current engine could have made them"
    assert max(lags) <= config.lag_bound == 3
    for row in read_trajectories(store, [group.members[0].ref for group in evaluation]):
        assert {turn.engine for turn in row.turns} == {"current"}
        assert set(row.token_versions[row.loss_mask].tolist()) == {5}
    assert stats["proxy"]["num_stale_unserved"] == 0


def check_logprobs(policy: Path, weights: dict[int, dict[str, torch.Tensor]], row, versions: list[int]) -> None:
    ids = row.token_ids.tolist()
    under = {version: full_recompute(policy, weights[version], ids) for version in versions}
    for at in np.flatnonzero(row.loss_mask).tolist():
        own = int(row.token_versions[at])
        assert row.behaviour_logprobs[at] == pytest.approx(float(under[own][at - 1, ids[at]]), abs=2e-4), (own, at)
    if len(versions) > 1:
        wrong = [
            abs(row.behaviour_logprobs[at] - float(under[other][at - 1, ids[at]]))
            for at in np.flatnonzero(row.loss_mask).tolist()
            for other in versions
            if other != row.token_versions[at]
        ]
        assert max(wrong) > 0.01, "the versions can be told apart"
