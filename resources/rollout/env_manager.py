"""One trajectory, from reset to row: {generate -> step}*, its tokens kept as they were sampled.

| who waits      | for what                     | until, at the latest                                             |
|----------------|------------------------------|------------------------------------------------------------------|
| the trajectory | its environment              | the family's ``reset_deadline_s`` and ``step_deadline_s`` (which |
|                |                              | bounds its ``judgement`` too)                                    |
| the trajectory | an engine                    | the proxy's deadlines (suspensions are waited out)               |
| the trajectory | others, with batch stepping  | their deadlines (`stepping`)                                     |
| nobody         | the environment's ``close``  | it runs on beside, within ``close_deadline_s``                   |
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, Literal

from resources.engines.base import GenerateRequest, Generation, SamplingParams
from resources.environments.base import Environment, Message, StepOutcome
from resources.environments.family import FamilyConfig
from resources.failures import EngineFailure, EnvironmentFailure, FailureClass, RollartError
from resources.rollout.cross_policy import drawn_policy
from resources.rollout.episode_record import Ending, EpisodeRecord
from resources.rollout.episode_services import EpisodeServices
from resources.rollout.history import append_observation, append_opening
from resources.rollout.messages import Assignment, PolicyCounts, Stage
from resources.trajectories.trajectory import Termination, Trajectory


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
        self._record = EpisodeRecord(submitted_at=services.unix_time())
        self._ending: Ending | None = None
        self._failure: RollartError | None = None
        self._cancelled_as: Termination | None = None
        self._handed_back = ""
        self._is_judged = self._is_over = False
        self._task: asyncio.Task[Any] | None = None

    @property
    def waits_for(self) -> str:
        """What the trajectory waits for, for people."""
        number = len(self._record.turns) + 1
        match self.stage:
            case "environment" if not self._record.prompt_length:
                return f"reset of environment {self._config.environment!r}"
            case "environment" if self._is_judged:
                return f"judgement of environment {self._config.environment!r}"
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
        return self._record.reward

    @property
    def policy_counts(self) -> PolicyCounts:
        """Which policies sampled it so far."""
        return self._record.policies.counts()

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
        assignment, services, record = self.assignment, self._services, self._record
        environment = self._open_environment()
        start = services.clock()
        messages = await environment.reset(assignment.seed_env)
        record.reset_s = services.clock() - start
        append_opening(services.chat, assignment.family, record, messages)
        for _ in range(environment.max_turns):
            room = services.context_length - len(record.tokens.sequence)
            if room <= 0:  # the prompt, or the last observation, left no room for an answer
                await self._end("max_tokens", truncated=True)
                return
            drawn = drawn_policy(services.cross_policy, assignment.split, assignment.seed_sampling, len(record.turns))
            generation = await self._generate(drawn, min(self._config.max_new_tokens, room))
            self._append_action(drawn, generation)
            if self._is_cut(generation):
                await self._end("max_tokens", truncated=True)
                return
            outcome = await self._step(environment)
            if outcome.terminated:
                await self._end("terminated", truncated=False)
                return
            if outcome.truncated:
                await self._end("max_turns", truncated=True)
                return
            last = int(generation.token_ids[-1]) if len(generation.token_ids) else None
            append_observation(services.chat, assignment.family, services.history, record, outcome.observation, last)
        await self._end("max_turns", truncated=True)

    def _open_environment(self) -> Environment:
        try:
            self._environment = self._services.make_environment(self.assignment.family, self._config)
        except Exception as error:
            raise EnvironmentFailure(
                f"{self.assignment.family}: the environment could not be made ({type(error).__name__}: {error})"
            ) from error
        return self._environment

    async def _generate(self, drawn: Literal["current", "stale"], max_new_tokens: int) -> Generation:
        assignment, config, tokens = self.assignment, self._config, self._record.tokens
        request = GenerateRequest(
            request_id=f"{assignment.trajectory_id}:{len(self._record.turns)}",
            trajectory_id=assignment.trajectory_id,
            token_ids=tokens.sequence,
            sampling=SamplingParams(
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                max_new_tokens=max_new_tokens,
                stop_token_ids=self._services.chat.stop_token_ids,
                greedy=assignment.greedy,
            ),
            seed=tokens.sampling_seed(assignment.seed_sampling),
            policy=drawn,
        )
        self._enter("others")
        await self._services.stepping.may_generate(assignment.trajectory_id)
        start = self._enter("engine")
        generation = await self._services.proxy.generate(request, config.hardware_class)
        self._record.generation_s += self._enter("environment") - start
        if len(generation.token_ids) > max_new_tokens:
            raise EngineFailure(
                f"engine {generation.engine} gave {len(generation.token_ids)} tokens where {max_new_tokens} "
                "were allowed"
            )
        return generation

    def _append_action(self, drawn: Literal["current", "stale"], generation: Generation) -> None:
        oldest_version = self._record.append_action(drawn, generation)
        if oldest_version is not None:
            self._services.on_first_sampled(self.assignment.trajectory_id, oldest_version)
        action = self._services.chat.decode_action(generation.token_ids)
        self._record.messages.append(Message(role="assistant", content=action))

    def _is_cut(self, generation: Generation) -> bool:
        """Whether the episode ends because this answer was cut short."""
        if generation.finish_reason == "context":
            return True
        if generation.finish_reason != "length":
            return False
        return self._services.length_finish == "end_episode" or (
            len(self._record.tokens.sequence) >= self._services.context_length
        )

    async def _step(self, environment: Environment) -> StepOutcome:
        self._enter("others")
        await self._services.stepping.may_step(self.assignment.trajectory_id)
        start = self._enter("environment")
        outcome = await environment.step(self._record.messages[-1]["content"])
        self._record.append_outcome(outcome, self._services.clock() - start)
        return outcome

    async def _end(self, termination: Termination, *, truncated: bool) -> None:
        if self._record.success is None and truncated:
            self._record.success = False
        assert self._environment is not None
        self._is_judged = True
        try:
            judgement = self._environment.judgement()
            self.judgement = await judgement if inspect.isawaitable(judgement) else judgement
        except RollartError:
            raise  # it names its boundary already
        except Exception as error:
            raise EnvironmentFailure(
                f"{self.assignment.family}: judgement raised {type(error).__name__}: {error}"
            ) from error
        if self.judgement is not None:
            self.judgement = {
                "num_invalid_actions": sum(turn.invalid_action for turn in self._record.turns),
                **self.judgement,
            }
        self._ending = Ending(termination, truncated)  # one that is cancelled before has none

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
        return self._record.as_trajectory(
            self.assignment,
            self._config,
            self._services.chat,
            self._how_it_ended(),
            env_version=self._environment.env_version if self._environment is not None else "",
            finished_at=self._services.unix_time(),
        )

    def _how_it_ended(self) -> Ending:
        if self._failure is not None:
            cause: Termination = "env_error" if isinstance(self._failure, EnvironmentFailure) else "engine_error"
            return Ending(cause, False, self._failure.failure_class, str(self._failure))
        if self._ending is not None:
            return self._ending
        assert self._cancelled_as is not None
        if self._handed_back:
            return Ending(self._cancelled_as, False, FailureClass.INFRASTRUCTURE, self._handed_back)
        message = f"stopped after {len(self._record.turns)} turns, reward so far {self._record.reward:g}"
        return Ending(self._cancelled_as, False, FailureClass.CANCELLED, message)
