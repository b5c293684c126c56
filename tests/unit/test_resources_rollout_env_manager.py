"""One trajectory over hand-written environments and engines: tokens, masks, endings, failures, cancellation."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from resources.engines.base import GenerateRequest, Generation
from resources.environments.base import Message, StepOutcome
from resources.environments.family import FamilyConfig
from resources.failures import EngineFailure, EnvironmentFailure, FailureClass
from resources.rollout.cross_policy import CrossPolicyConfig
from resources.rollout.encoding_cache import EncodingCache
from resources.rollout.env_manager import EnvManager
from resources.rollout.episode_services import EpisodeServices
from resources.rollout.messages import Assignment, Split
from resources.trajectories.schema import from_table, to_table

STOP = 2
NEWLINE = 10


class LetterFormat:
    """One token a letter: its code. A turn ends with STOP and NEWLINE; an opening of n letters has n + 1 tokens."""

    stop_token_ids = (STOP,)
    tokenizer_hash = template_hash = "letters"

    def __init__(self):
        self.num_calls = 0

    def opening(self, messages):
        self.num_calls += 1
        return np.array([ord(letter) for m in messages for letter in m["content"]] + [ord(">")], np.int32)

    def continuation(self, observation, last_token_id):
        self.num_calls += 1
        rest = [NEWLINE] if last_token_id == STOP else [STOP, NEWLINE]
        return np.array(rest + [ord(letter) for m in observation for letter in m["content"]] + [ord(">")], np.int32)

    def decode_action(self, token_ids):
        self.num_calls += 1
        ids = [int(token) for token in token_ids]
        return "".join(chr(token) for token in (ids[:-1] if ids and ids[-1] == STOP else ids))


class ScriptedGenerator:
    """Answers with the given generations: (text, finish reason, version)."""

    def __init__(self, *answers, **changes):
        self.answers, self.changes = list(answers), changes
        self.requests: list[GenerateRequest] = []
        self.released: list[str] = []
        self.aborted = 0

    def engine_of(self, trajectory_id):
        return "engine-e"

    async def generate(self, request, hardware_class):
        self.requests.append(request)
        if not self.answers:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.aborted += 1
                raise
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        text, finish, version = answer
        ids = [ord(letter) for letter in text][: request.sampling.max_new_tokens] + ([STOP] if finish == "stop" else [])
        versions = np.full(len(ids), version, np.int32) if np.isscalar(version) else np.array(version, np.int32)
        fields = dict(
            request_id=request.request_id, trajectory_id=request.trajectory_id, token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32), versions=versions, finish_reason=finish, engine="e",
            hardware_class=hardware_class,
        )  # fmt: skip
        return Generation(**{**fields, **self.changes})

    def release(self, trajectory_id):
        self.released.append(trajectory_id)


class EchoEnvironment:
    """Says what it heard; "win" ends it with reward 1, "bad" is malformed."""

    env_version = "1"
    max_turns = 8

    def __init__(self, opening: str = "go"):
        self.opening = opening
        self.heard: list[str] = []
        self.closed = False

    async def reset(self, seed):
        return [Message(role="user", content=self.opening)]

    async def step(self, action):
        self.heard.append(action)
        if action == "win":
            return StepOutcome([], reward=1.0, terminated=True, success=True, components={"outcome": 1.0})
        last = len(self.heard) >= self.max_turns
        bad = action == "bad"
        return StepOutcome(
            [] if last else [Message(role="user", content=f"={action}")], reward=-0.1 if bad else 0.0, truncated=last,
            invalid_action=bad, components={"invalid_action": -0.1} if bad else {},
        )  # fmt: skip

    async def close(self):
        self.closed = True

    def judgement(self):
        return None


class BrokenEnvironment(EchoEnvironment):
    async def step(self, action):
        raise EnvironmentFailure("lake: step did not return within 30 s")


class HangingEnvironment(EchoEnvironment):
    async def step(self, action):
        await asyncio.sleep(3600)


class UnclosableEnvironment(EchoEnvironment):
    async def close(self):
        raise OSError("no such process")


class Stage:
    """One EnvManager with its fakes."""

    def __init__(
        self, *answers, environment: EchoEnvironment | None = None, context_length=200, greedy=False, changes=None,
        make: Callable | None = None, length_finish="end_episode", split: Split = "train",
        cross_policy: CrossPolicyConfig | None = None, **family,
    ):  # fmt: skip
        self.environment = environment or EchoEnvironment()
        self.format = LetterFormat()
        self.generator = ScriptedGenerator(*answers, **(changes or {}))
        self.sampled: list[tuple[str, int]] = []
        self.lines: list[str] = []
        self.services = EpisodeServices(
            chat=EncodingCache(self.format),
            proxy=self.generator,
            make_environment=make or (lambda name, config: self.environment),
            context_length=context_length,
            length_finish=length_finish,
            cross_policy=cross_policy,
            on_first_sampled=lambda key, version: self.sampled.append((key, version)),
            log=self.lines.append,
        )
        config = FamilyConfig(**{"environment": "echo", "hardware_class": "compute", "max_new_tokens": 8, **family})
        assignment = Assignment("run", "echo", "echo-000000", 0, 0, 1, 11, 22, split, greedy=greedy)
        self.manager = EnvManager(assignment, config, self.services)

    def play(self):
        async def main():
            trajectory = await self.manager.play()
            if self.services.closing:
                await asyncio.wait(self.services.closing)
            return trajectory

        return asyncio.run(main())


def test_a_trajectory_is_what_was_sampled_and_the_rest_is_context():
    """M16, M17: the newline after the stop token is context with mask 0; the sampled ids come out as they were."""
    stage = Stage(("a", "stop", 3), ("win", "stop", 4))
    t = stage.play()
    text = "go>a\x02\n=a>win\x02"
    assert "".join(map(chr, t.token_ids)) == text
    assert "".join("x" if kept else "." for kept in t.loss_mask) == "...xx....xxxx"
    assert t.token_versions.tolist() == [-1] * 3 + [3] * 2 + [-1] * 4 + [4] * 4
    assert t.behaviour_logprobs[t.loss_mask].tolist() == [-0.5] * 6 and not t.behaviour_logprobs[~t.loss_mask].any()
    assert (t.prompt_length, t.reward, t.success, t.termination, t.truncated) == (3, 1.0, True, "terminated", False)
    assert [(u.observation_start, u.action_start, u.action_end) for u in t.turns] == [(0, 3, 5), (5, 9, 13)]
    assert [message["content"] for message in t.messages] == ["go", "a", "=a", "win"]
    assert (t.oldest_version, t.newest_version) == (3, 4)
    assert stage.sampled == [("run/echo-000000/0/0", 3)]
    assert stage.environment.closed and stage.generator.released == ["run/echo-000000/0/0"]
    assert [request.seed for request in stage.generator.requests] == [22, 22]
    assert t.failure_class is None and t.reward_components == {"outcome": 1.0}


def test_versions_are_kept_token_by_token():
    """S2: the version moves after 57 of 128 sampled tokens: spans (v7: 57), (v8: 71)."""
    stage = Stage(("a" * 127, "stop", [7] * 57 + [8] * 71), max_new_tokens=128, context_length=512)
    stage.environment.max_turns = 1
    t = stage.play()
    spans = np.unique(t.token_versions[t.loss_mask], return_counts=True)
    assert [list(map(int, part)) for part in spans] == [[7, 8], [57, 71]]


def test_several_turns_keep_every_token():
    """M18: 3 turns x 6 tokens under a per-turn limit of 8: 18 sampled tokens in the row."""
    stage = Stage(*[("abcde", "stop", 0)] * 3)
    stage.environment.max_turns = 3
    t = stage.play()
    assert t.num_sampled_tokens == 18 and len(t.turns) == 3
    assert (t.termination, t.truncated, t.success) == ("max_turns", True, False)


def test_an_answer_cut_by_length_ends_the_episode():
    """S16, M19: finish reason length at turn 2 of 8: the episode ends at 2, truncated."""
    stage = Stage(("a", "stop", 0), ("abcdefgh", "length", 0), ("never", "stop", 0))
    t = stage.play()
    assert len(t.turns) == 2 and stage.environment.heard == ["a"]
    assert (t.termination, t.truncated, t.success, t.reward) == ("max_tokens", True, False, 0.0)
    assert t.turns[1].finish_reason == "length"


def test_an_answer_cut_by_length_may_go_on_by_configuration():
    """M19: as the configuration says: the cut text goes to the environment, the missing stop token is context."""
    stage = Stage(("abcdefgh", "length", 0), ("win", "stop", 0), length_finish="step")
    t = stage.play()
    assert stage.environment.heard == ["abcdefgh", "win"]
    assert "".join(map(chr, t.token_ids)) == "go>abcdefgh\x02\n=abcdefgh>win\x02"
    assert not t.loss_mask[11]


def test_the_context_bounds_what_is_asked_for():
    """S15: prompt 400, context 512, ask 200: 112 are asked for, and the episode ends there without a penalty."""
    stage = Stage(
        ("a" * 200, "length", 0), environment=EchoEnvironment("x" * 399), context_length=512, max_new_tokens=200
    )
    t = stage.play()
    assert stage.generator.requests[0].sampling.max_new_tokens == 112
    assert (len(t.token_ids), t.truncated, t.termination, t.reward) == (512, True, "max_tokens", 0.0)


def test_a_prompt_over_the_limit_is_a_masked_truncated_trajectory():
    """M23: no engine is asked, nothing is sampled, nothing raises."""
    stage = Stage(environment=EchoEnvironment("x" * 300), context_length=200)
    t = stage.play()
    assert not stage.generator.requests and not t.loss_mask.any() and len(t.token_ids) == 301
    assert (t.truncated, t.termination, t.oldest_version, t.failure_class) == (True, "max_tokens", None, None)


@pytest.mark.parametrize("finish", ["stop", "context"])
def test_an_answer_without_tokens(finish):
    """M23: no IndexError; an empty action is the environment's to judge, a full context ends the episode."""
    empty = np.empty(0, np.int32)
    stage = Stage(("", finish, 0), changes={"token_ids": empty, "logprobs": empty, "versions": empty})
    stage.environment.max_turns = 1
    t = stage.play()
    assert t.num_sampled_tokens == 0 and t.oldest_version is None and not stage.sampled
    assert stage.environment.heard == ([""] if finish == "stop" else [])
    assert t.truncated


def test_lists_of_different_lengths_are_refused():
    """M15: 3 log-probabilities for 4 tokens: the engine is at fault, nothing is padded."""
    stage = Stage(("abc", "stop", 0), changes={"logprobs": np.zeros(3, np.float32)})
    t = stage.play()
    assert t.failure_class is FailureClass.ENGINE and "4 tokens, 3 log-probabilities" in t.failure_message
    assert t.reward is None and t.termination == "engine_error"


def test_more_tokens_than_asked_for_are_refused():
    """M18: a loud error, never a cut row."""
    ids = np.arange(20, dtype=np.int32)
    changes = {"token_ids": ids, "logprobs": np.zeros(20, np.float32), "versions": np.zeros(20, np.int32)}
    t = Stage(("abc", "stop", 0), changes=changes).play()
    assert t.failure_class is FailureClass.ENGINE and "20 tokens where 8 were allowed" in t.failure_message


def test_masks_come_from_lengths_not_from_values():
    """M12: ids 5, 6, 2 with pad = eos = 2: the sampled stop token is trained, stop tokens in the context are not."""
    stage = Stage(("\x05\x06", "stop", 0), environment=EchoEnvironment("\x02\x02"))
    stage.environment.max_turns = 1
    t = stage.play()
    assert t.token_ids.tolist() == [2, 2, ord(">"), 5, 6, 2]
    assert t.loss_mask.tolist() == [False] * 3 + [True] * 3


def test_malformed_actions_go_on():
    """S14: an error observation and the next turn, the malformed action marked and paid for."""
    stage = Stage(("bad", "stop", 0), ("win", "stop", 0))
    t = stage.play()
    assert [turn.invalid_action for turn in t.turns] == [True, False]
    assert t.reward == pytest.approx(0.9) and t.reward_components == {"invalid_action": -0.1, "outcome": 1.0}


def test_an_environment_failure_is_data():
    stage = Stage(("a", "stop", 5), environment=BrokenEnvironment())
    t = stage.play()
    assert (t.failure_class, t.reward, t.success, t.termination) == (
        FailureClass.ENVIRONMENT, None, None, "env_error",
    )  # fmt: skip
    assert "step did not return" in t.failure_message and t.turns[-1].error == t.failure_message
    assert t.num_sampled_tokens == 2, "what was sampled is kept"
    assert stage.environment.closed


def test_an_environment_that_cannot_be_made_is_a_failure_of_this_trajectory():
    def refuse(name, config):
        raise RuntimeError("no licence")

    t = Stage(make=refuse).play()
    assert t.failure_class is FailureClass.ENVIRONMENT and "no licence" in t.failure_message


def test_an_engine_failure_is_data():
    t = Stage(EngineFailure("3 engines failed")).play()
    assert (t.failure_class, t.termination) == (FailureClass.ENGINE, "engine_error")


def test_a_close_that_raises_is_a_line_in_the_log():
    stage = Stage(("win", "stop", 0), environment=UnclosableEnvironment())
    assert stage.play().reward == 1.0
    assert stage.lines == ["run/echo-000000/0/0: close raised OSError: no such process"]


class NeverClosingEnvironment(EchoEnvironment):
    async def close(self):
        await asyncio.sleep(3600)


def test_nobody_waits_for_a_close_that_hangs():
    stage = Stage(("win", "stop", 0), environment=NeverClosingEnvironment())
    stage.services = dataclasses.replace(stage.services, close_deadline_s=0.01)
    stage.manager = EnvManager(stage.manager.assignment, stage.manager._config, stage.services)

    async def main():
        trajectory = await stage.manager.play()
        (closing,) = stage.services.closing
        assert not closing.done(), "the trajectory is there before it"
        await asyncio.wait_for(closing, 10)
        return trajectory

    assert asyncio.run(main()).reward == 1.0
    assert stage.lines == ["run/echo-000000/0/0: close did not return within 0.01 s"]


@pytest.mark.parametrize("waits_for", ["engine", "environment"])
def test_cancelling_stops_at_once_and_keeps_what_was_played(waits_for):
    environment = HangingEnvironment() if waits_for == "environment" else EchoEnvironment()
    stage = Stage(("a", "stop", 1), environment=environment)

    async def main():
        playing = asyncio.create_task(stage.manager.play())
        for _ in range(10):
            await asyncio.sleep(0)
        assert stage.manager.stage == waits_for
        named = {"engine": "generation 2 on engine-e", "environment": "step 1 of environment 'echo'"}
        assert stage.manager.waits_for == named[waits_for]
        stage.manager.cancel("evicted_stale")
        trajectory = await playing
        await asyncio.sleep(0)
        return trajectory

    t = asyncio.run(main())
    assert (t.termination, t.failure_class, t.reward) == ("evicted_stale", FailureClass.CANCELLED, None)
    assert len(t.turns) == 1 and environment.closed
    assert stage.generator.aborted == (1 if waits_for == "engine" else 0)
    assert stage.generator.released == ["run/echo-000000/0/0"]


class SlowlyJudgedEnvironment(EchoEnvironment):
    async def judgement(self):
        await asyncio.sleep(3600)


def test_cancelling_while_it_is_judged_leaves_neither_reward_nor_success():
    """The episode is over, but what a scorer needs of it is not there: it must not pass for one that ended well."""
    environment = SlowlyJudgedEnvironment()
    stage = Stage(("win", "stop", 0), environment=environment)

    async def main():
        playing = asyncio.create_task(stage.manager.play())
        for _ in range(10):
            await asyncio.sleep(0)
        assert stage.manager.waits_for == "judgement of environment 'echo'"
        stage.manager.cancel("cancelled_redundant")
        trajectory = await playing
        await asyncio.sleep(0)
        return trajectory

    t = asyncio.run(main())
    assert (t.termination, t.failure_class) == ("cancelled_redundant", FailureClass.CANCELLED)
    assert (t.reward, t.success) == (None, None) and environment.closed


def test_cancelling_before_the_first_step_and_after_the_end():
    stage = Stage(("win", "stop", 0))
    stage.manager.cancel("preempted")
    assert stage.play().termination == "preempted"
    stage = Stage(("win", "stop", 0))
    trajectory = stage.play()
    stage.manager.cancel("preempted")
    assert trajectory.termination == "terminated"


def test_greedy_is_asked_of_the_engine():
    stage = Stage(("win", "stop", 0), greedy=True)
    stage.play()
    assert stage.generator.requests[0].sampling.greedy


def test_encodings_are_kept():
    """Siblings share an opening; what was encoded once is not encoded again."""
    stage = Stage(("a", "stop", 0), ("win", "stop", 0))
    first = stage.play()
    calls = stage.format.num_calls
    stage.generator.answers = [("a", "stop", 0), ("win", "stop", 0)]
    stage.environment.heard.clear()
    stage.manager = EnvManager(stage.manager.assignment, stage.manager._config, stage.services)
    assert stage.play().token_ids.tolist() == first.token_ids.tolist()
    assert stage.format.num_calls == calls


class ToolSpeakingEnvironment(EchoEnvironment):
    """Finds a call in every action and answers it by its id; its judgement is a coroutine, as that of a child is."""

    async def step(self, action):
        call = {"id": "call_0_0", "type": "function", "function": {"name": "look", "arguments": '{"a":'}}
        answer = Message(role="tool", content="error: no JSON", tool_call_id="call_0_0", name="look")
        self.heard.append(action)
        return StepOutcome([answer], truncated=len(self.heard) == 2, tool_calls=[call], tool_name="look")

    async def judgement(self):
        return {"heard": len(self.heard)}


def test_tool_calls_and_the_ids_of_their_answers_survive_into_the_row():
    """S14: the ids stay paired in the trajectory's messages, through the table and back."""
    stage = Stage(("a", "stop", 0), ("b", "stop", 0), environment=ToolSpeakingEnvironment())
    (read,) = from_table(to_table([stage.play()]))
    assert [message["role"] for message in read.messages] == ["user", "assistant", "tool", "assistant", "tool"]
    asked, answered = read.messages[1:3]
    assert asked["content"] == "a" and answered["name"] == "look"
    assert asked["tool_calls"][0]["id"] == answered["tool_call_id"] == "call_0_0"
    assert asked["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a":'}
    assert [turn.tool_name for turn in read.turns] == ["look", "look"]
    assert stage.manager.judgement == {"num_invalid_actions": 0, "heard": 2}


def test_messages_that_differ_only_in_the_call_they_answer_are_encoded_apart():
    """A template may print the id (Mistral's does)."""
    chat = LetterFormat()
    cache = EncodingCache(chat)
    for call in ("call_0_0", "call_1_0", "call_0_0"):
        cache.continuation([Message(role="tool", content="x", tool_call_id=call, name="look")], STOP)
    assert (chat.num_calls, cache.num_hits) == (2, 1)
