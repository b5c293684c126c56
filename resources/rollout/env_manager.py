"""One trajectory, from reset to row: {generate -> step}*, its tokens kept as they were sampled.

| who waits      | for what                     | until, at the latest                                             |
|----------------|------------------------------|------------------------------------------------------------------|
| the trajectory | its environment              | the family's ``reset_deadline_s`` and ``step_deadline_s``        |
| the trajectory | an engine                    | the proxy's deadlines (suspensions are waited out)               |
| the trajectory | others, with batch stepping  | their deadlines (`stepping`)                                     |
| nobody         | the environment's ``close``  | it runs on beside, within ``close_deadline_s``                   |
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from resources.engines.base import GenerateRequest, Generation, SamplingParams
from resources.environments.base import Environment, Message, StepOutcome
from resources.environments.family import FamilyConfig
from resources.failures import EngineFailure, EnvironmentFailure, FailureClass, RollartError
from resources.rollout.cross_policy import CrossPolicyConfig
from resources.rollout.encoding_cache import EncodingCache
from resources.rollout.messages import Assignment, PolicyCounts, Stage
from resources.rollout.policy_record import PolicyRecord
from resources.rollout.stepping import Stepping, TrajectoryStepping
from resources.rollout.token_record import TokenRecord
from resources.trajectories.trajectory import Termination, Trajectory, Turn


class Generator(Protocol):
    """What a trajectory needs of the proxy."""

    async def generate(self, request: GenerateRequest, hardware_class: str) -> Generation: ...
    def release(self, trajectory_id: str) -> None: ...
    def engine_of(self, trajectory_id: str) -> str:
        """Name of the engine that generates for it; empty while none does."""
        ...


@dataclass(frozen=True)
class EpisodeServices:
    """What the trajectories of one worker share."""

    chat: EncodingCache
    proxy: Generator
    make_environment: Callable[[str, FamilyConfig], Environment]
    """(family name, its configuration) -> a fresh environment whose calls end at their deadlines."""
    context_length: int
    """Tokens of a trajectory, at most."""
    length_finish: str = "end_episode"
    """See `RolloutConfig.length_finish`."""
    history: str = "append"
    """See `RolloutConfig.history`."""
    stepping: Stepping = field(default_factory=TrajectoryStepping)
    """Who takes a turn when; evaluation episodes never wait for others."""
    cross_policy: CrossPolicyConfig | None = None
    """Which turns of training trajectories are stale engines'; None: none."""
    on_first_sampled: Callable[[str, int], None] = lambda trajectory_id, version: None
    """The oldest version of a trajectory's sampled tokens, whenever it becomes known or sinks."""
    log: Callable[[str], None] = lambda line: None
    close_deadline_s: float = 10.0
    unix_time: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    closing: set[asyncio.Task[None]] = field(default_factory=set)
    """Environments that are being closed."""


class EnvManager:
    """Plays one assignment. `play` returns the trajectory however the episode went; it raises only when cancelled from
    outside (the worker ends)."""

    def __init__(self, assignment: Assignment, config: FamilyConfig, services: EpisodeServices) -> None:
        self.assignment = assignment
        self.judgement: dict[str, Any] | None = None
        """The environment's payload for a scorer, once the episode is over."""
        self.stage: Stage = "environment"
        self.stage_since = services.clock()
        self._config, self._services = config, services
        self._environment: Environment | None = None
        self._tokens = TokenRecord()
        self._policies = PolicyRecord()
        self._prompt_length = 0
        self._turns: list[Turn] = []
        self._messages: list[Message] = []
        self._reward = 0.0
        self._components: dict[str, float] = {}
        self._success: bool | None = None
        self._ending: tuple[Termination, bool] | None = None
        self._failure: RollartError | None = None
        self._cancelled_as: Termination | None = None
        self._handed_back = ""
        self._is_over = False
        self._task: asyncio.Task[Any] | None = None
        self._submitted_at = self._started_at = services.unix_time()
        self._reset_s = self._environment_s = self._generation_s = 0.0

    @property
    def waits_for(self) -> str:
        """What the trajectory waits for, for people."""
        number = len(self._turns) + 1
        match self.stage:
            case "environment" if not self._prompt_length:
                return f"reset of environment {self._config.environment!r}"
            case "environment":
                return f"step {number - 1} of environment {self._config.environment!r}"
            case "engine":
                engine = self._services.proxy.engine_of(self.assignment.trajectory_id)
                return f"generation {number} on {engine}" if engine else f"an engine for generation {number}"
            case "others":
                return f"the others of its worker, behind turn {number - 1}"
            case "store":
                return "its row to be judged, sealed and handed over"

    @property
    def reward_so_far(self) -> float:
        return self._reward

    @property
    def policy_counts(self) -> PolicyCounts:
        """Which policies sampled it so far."""
        return self._policies.counts()

    def cancel(self, termination: Termination) -> None:
        """Stop at once: environment closed, engine slot freed. No-op when the episode is over."""
        if self._cancelled_as is None and not self._is_over:
            self._cancelled_as = termination
            if self._task is not None:
                self._task.cancel()

    def hand_back(self, reason: str) -> None:
        """Stop at once, to be played again elsewhere: its worker is worn out. No-op when the episode is over."""
        if self._cancelled_as is None and not self._is_over:
            self._handed_back = reason
            self.cancel("preempted")

    async def play(self) -> Trajectory:
        self._task = asyncio.current_task()
        if self.assignment.split == "train":
            self._services.stepping.join(self.assignment.trajectory_id)
        try:
            if self._cancelled_as is None:
                await self._play_turns()
        except asyncio.CancelledError:
            if self._cancelled_as is None or self._task is None:
                raise
            self._task.uncancel()
        except (EnvironmentFailure, EngineFailure) as failure:
            self._failure = failure
        finally:
            self._is_over = True
            self._services.stepping.leave(self.assignment.trajectory_id)
            self._let_go()
        return self._as_trajectory()

    # -- the episode -------------------------------------------------------------------------------------------------

    async def _play_turns(self) -> None:
        environment = self._open_environment()
        start = self._services.clock()
        messages = await environment.reset(self.assignment.seed_env)
        self._reset_s = self._services.clock() - start
        self._messages = list(messages)
        self._append_context(self._services.chat.opening, messages)
        self._prompt_length = self._tokens.num_tokens
        for _ in range(environment.max_turns):
            observation_start = self._turns[-1].action_end if self._turns else 0
            room = self._services.context_length - len(self._tokens.sequence)
            if room <= 0:  # the prompt, or the last observation, left no room for an answer
                await self._end("max_tokens", truncated=True)
                return
            generation = await self._generate(min(self._config.max_new_tokens, room))
            turn = self._append_action(observation_start, generation)
            if self._is_cut(generation):
                await self._end("max_tokens", truncated=True)
                return
            outcome = await self._step(environment, turn)
            if outcome.terminated:
                await self._end("terminated", truncated=False)
                return
            if outcome.truncated:
                await self._end("max_turns", truncated=True)
                return
            last = int(generation.token_ids[-1]) if len(generation.token_ids) else None
            self._append_observation(outcome.observation, last)
        await self._end("max_turns", truncated=True)

    def _open_environment(self) -> Environment:
        try:
            self._environment = self._services.make_environment(self.assignment.family, self._config)
        except Exception as error:
            raise EnvironmentFailure(
                f"{self.assignment.family}: the environment could not be made ({type(error).__name__}: {error})"
            ) from error
        return self._environment

    def _append_context(self, encode: Callable[..., np.ndarray], *what: Any) -> None:
        try:
            token_ids = encode(*what)
        except ValueError as error:  # the template refuses what the environment said
            raise EnvironmentFailure(f"{self.assignment.family}: {error}") from error
        self._tokens.append_context(token_ids)

    def _append_observation(self, observation: list[Message], last_token_id: int | None) -> None:
        chat = self._services.chat
        if self._services.history == "append":
            self._append_context(chat.continuation, observation, last_token_id)
            return
        try:
            rest = chat.extension(self._messages, self._tokens.sequence)
            begins_anew = rest is None
            rest = chat.whole(self._messages) if rest is None else rest
        except ValueError as error:  # the template refuses the conversation
            raise EnvironmentFailure(f"{self.assignment.family}: {error}") from error
        if begins_anew:
            self._tokens.begin_sequence()
        self._tokens.append_context(rest)

    async def _generate(self, max_new_tokens: int) -> Generation:
        assignment, config, policy = self.assignment, self._config, self._draw_policy()
        request = GenerateRequest(
            request_id=f"{assignment.trajectory_id}:{len(self._turns)}",
            trajectory_id=assignment.trajectory_id,
            token_ids=self._tokens.sequence,
            sampling=SamplingParams(
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                max_new_tokens=max_new_tokens,
                stop_token_ids=self._services.chat.stop_token_ids,
                greedy=assignment.greedy,
            ),
            seed=self._tokens.sampling_seed(assignment.seed_sampling),
            policy=policy,
        )
        self._enter("others")
        await self._services.stepping.may_generate(assignment.trajectory_id)
        start = self._enter("engine")
        generation = await self._services.proxy.generate(request, config.hardware_class)
        self._generation_s += self._enter("environment") - start
        if len(generation.token_ids) > max_new_tokens:
            raise EngineFailure(
                f"engine {generation.engine} gave {len(generation.token_ids)} tokens where {max_new_tokens} "
                "were allowed"
            )
        return generation

    def _draw_policy(self) -> Literal["current", "stale"]:
        """Whose turn it is: evaluation measures one version, that of the current engines."""
        cross_policy, assignment = self._services.cross_policy, self.assignment
        if cross_policy is None or assignment.split != "train":
            return "current"
        return "stale" if cross_policy.is_stale_turn(assignment.seed_sampling, len(self._turns)) else "current"

    def _append_action(self, observation_start: int, generation: Generation) -> Turn:
        action_start = self._tokens.num_tokens
        self._tokens.append_sampled(generation)
        before = self._turns[-1] if self._turns else None
        # The engine before has the KV of all but the last token that it sampled, if that is of the sequence under way.
        sequence_start = self._tokens.sequence_starts[-1] if self._tokens.sequence_starts else 0
        num_held = 0 if before is None else max(0, before.action_end - 1 - sequence_start)
        oldest_version = self._policies.note(self._draw_policy(), generation, before, num_held)
        if oldest_version is not None:
            self._services.on_first_sampled(self.assignment.trajectory_id, oldest_version)
        turn = Turn(
            observation_start=observation_start,
            action_start=action_start,
            action_end=self._tokens.num_tokens,
            engine=generation.engine,
            hardware_class=generation.hardware_class,
            finish_reason=generation.finish_reason,
            cached_tokens=generation.cached_tokens,
            queue_s=generation.queue_s,
            prefill_s=generation.prefill_s,
            decode_s=generation.decode_s,
        )
        self._turns.append(turn)
        action = self._services.chat.decode_action(generation.token_ids)
        self._messages.append(Message(role="assistant", content=action))
        return turn

    def _is_cut(self, generation: Generation) -> bool:
        """Whether the episode ends because this answer was cut short."""
        if generation.finish_reason == "context":
            return True
        if generation.finish_reason != "length":
            return False
        return self._services.length_finish == "end_episode" or (
            len(self._tokens.sequence) >= self._services.context_length
        )

    async def _step(self, environment: Environment, turn: Turn) -> StepOutcome:
        self._enter("others")
        await self._services.stepping.may_step(self.assignment.trajectory_id)
        start = self._enter("environment")
        outcome = await environment.step(self._messages[-1]["content"])
        turn.environment_s = self._services.clock() - start
        self._environment_s += turn.environment_s
        turn.reward, turn.tool_name, turn.invalid_action = outcome.reward, outcome.tool_name, outcome.invalid_action
        self._reward += outcome.reward
        for name, value in outcome.components.items():
            self._components[name] = self._components.get(name, 0.0) + value
        if outcome.success is not None:
            self._success = outcome.success
        if outcome.tool_calls:
            self._messages[-1]["tool_calls"] = outcome.tool_calls
        self._messages += outcome.observation
        return outcome

    async def _end(self, termination: Termination, *, truncated: bool) -> None:
        self._ending = (termination, truncated)
        if self._success is None and truncated:
            self._success = False
        assert self._environment is not None
        try:
            judgement: Any = self._environment.judgement()
            self.judgement = await judgement if inspect.isawaitable(judgement) else judgement
        except RollartError:
            raise  # it names its boundary already
        except Exception as error:
            raise EnvironmentFailure(
                f"{self.assignment.family}: judgement raised {type(error).__name__}: {error}"
            ) from error
        if self.judgement is not None:
            self.judgement = {"num_invalid_actions": sum(turn.invalid_action for turn in self._turns), **self.judgement}

    def _let_go(self) -> None:
        """Free the engine's memory of this trajectory, and close the environment beside: nobody waits for it."""
        self._services.proxy.release(self.assignment.trajectory_id)
        if self._environment is not None:
            closing = asyncio.get_running_loop().create_task(self._close(self._environment))
            self._services.closing.add(closing)
            closing.add_done_callback(self._services.closing.discard)
        self._enter("store")

    async def _close(self, environment: Environment) -> None:
        try:
            async with asyncio.timeout(self._services.close_deadline_s):
                await environment.close()
        except TimeoutError:
            self._services.log(
                f"{self.assignment.trajectory_id}: close did not return within {self._services.close_deadline_s:g} s"
            )
        except Exception as error:  # noqa: BLE001 - a user's code; the episode is over and its result stands
            self._services.log(f"{self.assignment.trajectory_id}: close raised {type(error).__name__}: {error}")

    def _enter(self, stage: Stage) -> float:
        self.stage, self.stage_since = stage, self._services.clock()
        return self.stage_since

    # -- the row -----------------------------------------------------------------------------------------------------

    def _as_trajectory(self) -> Trajectory:
        assignment, config, tokens = self.assignment, self._config, self._tokens
        termination, truncated, failure, message = self._outcome()
        if failure is not None and self._turns:
            self._turns[-1].error = message
        return Trajectory(
            run_id=assignment.run_id,
            trajectory_id=assignment.trajectory_id,
            rollout_id=assignment.trajectory_id,
            attempt=assignment.attempt,
            family=assignment.family,
            env_id=config.environment,
            env_version=self._environment.env_version if self._environment is not None else "",
            group_id=assignment.group_id,
            member=assignment.member,
            group_size=assignment.group_size,
            seed_env=assignment.seed_env,
            seed_sampling=assignment.seed_sampling,
            split=assignment.split,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            tokenizer_hash=self._services.chat.tokenizer_hash,
            template_hash=self._services.chat.template_hash,
            token_ids=tokens.token_ids,
            loss_mask=tokens.loss_mask,
            behaviour_logprobs=tokens.logprobs,
            token_versions=tokens.versions,
            prompt_length=self._prompt_length,
            turns=self._turns,
            reward=None if failure is not None else self._reward,
            reward_components=self._components,
            success=self._success if failure is None else None,
            termination=termination,
            truncated=truncated,
            failure_class=failure,
            failure_message=message,
            messages=self._messages,
            final_state=next((m["content"] for m in reversed(self._messages) if m["role"] != "assistant"), ""),
            submitted_at=self._submitted_at,
            started_at=self._started_at,
            finished_at=self._services.unix_time(),
            reset_s=self._reset_s,
            environment_s=self._environment_s,
            generation_s=self._generation_s,
            sequence_starts=tokens.sequence_starts,
        )

    def _outcome(self) -> tuple[Termination, bool, FailureClass | None, str]:
        """(termination, truncated, failure class, message)"""
        if self._failure is not None:
            cause: Termination = "env_error" if isinstance(self._failure, EnvironmentFailure) else "engine_error"
            return cause, False, self._failure.failure_class, str(self._failure)
        if self._ending is not None:
            return *self._ending, None, ""
        assert self._cancelled_as is not None
        if self._handed_back:
            return self._cancelled_as, False, FailureClass.INFRASTRUCTURE, self._handed_back
        reward = f"reward so far {self._reward:g}"
        return self._cancelled_as, False, FailureClass.CANCELLED, f"stopped after {len(self._turns)} turns, {reward}"
