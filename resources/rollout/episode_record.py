"""What has an episode left so far, and which row does it become?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from resources.engines.base import Generation
from resources.environments.base import Message, StepOutcome
from resources.environments.family import FamilyConfig
from resources.failures import FailureClass
from resources.rollout.encoding_cache import EncodingCache
from resources.rollout.messages import Assignment
from resources.rollout.policy_record import PolicyRecord
from resources.rollout.token_record import TokenRecord
from resources.trajectories.trajectory import Termination, Trajectory, Turn


class Ending(NamedTuple):
    """How an episode ended, as its row says it."""

    termination: Termination
    truncated: bool
    failure_class: FailureClass | None = None
    """None: it ended well, and its reward counts."""
    failure_message: str = ""


@dataclass(slots=True)
class EpisodeRecord:
    """Grows turn by turn: an action, then the environment's answer. With slots: every waiting trajectory has one."""

    submitted_at: float
    """Unix seconds."""
    tokens: TokenRecord = field(default_factory=TokenRecord)
    policies: PolicyRecord = field(default_factory=PolicyRecord)
    prompt_length: int = 0
    """Tokens of the opening; 0 before the reset."""
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    """Sum over the steps so far."""
    components: dict[str, float] = field(default_factory=dict)
    success: bool | None = None
    reset_s: float = 0.0
    environment_s: float = 0.0
    generation_s: float = 0.0

    def append_action(self, drawn: Literal["current", "stale"], generation: Generation) -> int | None:
        """Open a turn with what an engine sampled; its message is the caller's to append. Returns the oldest version of
        the trajectory where it becomes known or sinks. Raises EngineFailure when the engine's lists differ in length.

        Args:
            drawn: which engines the turn was meant for.
        """
        tokens, before = self.tokens, self.turns[-1] if self.turns else None
        action_start = tokens.num_tokens
        tokens.append_sampled(generation)
        # The engine before has the KV of all but the last token that it sampled, if that is of the sequence under way.
        sequence_start = tokens.sequence_starts[-1] if tokens.sequence_starts else 0
        num_held = 0 if before is None else max(0, before.action_end - 1 - sequence_start)
        oldest_version = self.policies.note(drawn, generation, before, num_held)
        self.turns.append(
            Turn(
                observation_start=0 if before is None else before.action_end,
                action_start=action_start,
                action_end=tokens.num_tokens,
                engine=generation.engine,
                hardware_class=generation.hardware_class,
                finish_reason=generation.finish_reason,
                cached_tokens=generation.cached_tokens,
                queue_s=generation.queue_s,
                prefill_s=generation.prefill_s,
                decode_s=generation.decode_s,
            )
        )
        return oldest_version

    def append_outcome(self, outcome: StepOutcome, environment_s: float) -> None:
        """Close the turn with the environment's answer, which took that long. Its tokens are `history`'s to append."""
        turn = self.turns[-1]
        turn.environment_s = environment_s
        self.environment_s += environment_s
        turn.reward, turn.tool_name, turn.invalid_action = outcome.reward, outcome.tool_name, outcome.invalid_action
        self.reward += outcome.reward
        for name, value in outcome.components.items():
            self.components[name] = self.components.get(name, 0.0) + value
        if outcome.success is not None:
            self.success = outcome.success
        if outcome.tool_calls:
            self.messages[-1]["tool_calls"] = outcome.tool_calls
        self.messages += outcome.observation

    def as_trajectory(
        self,
        assignment: Assignment,
        config: FamilyConfig,
        chat: EncodingCache,
        ending: Ending,
        *,
        env_version: str,
        finished_at: float,
    ) -> Trajectory:
        """The row of the finished episode. A failed one has neither reward nor success.

        Args:
            chat: whose tokenizer and template the row names.
            env_version: empty when there was no environment.
            finished_at: Unix seconds.
        """
        tokens, failed = self.tokens, ending.failure_class is not None
        if failed and self.turns:
            self.turns[-1].error = ending.failure_message
        return Trajectory(
            run_id=assignment.run_id,
            trajectory_id=assignment.trajectory_id,
            rollout_id=assignment.trajectory_id,
            attempt=assignment.attempt,
            family=assignment.family,
            env_id=config.environment,
            env_version=env_version,
            group_id=assignment.group_id,
            member=assignment.member,
            group_size=assignment.group_size,
            seed_env=assignment.seed_env,
            seed_sampling=assignment.seed_sampling,
            split=assignment.split,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            tokenizer_hash=chat.tokenizer_hash,
            template_hash=chat.template_hash,
            token_ids=tokens.token_ids,
            loss_mask=tokens.loss_mask,
            behaviour_logprobs=tokens.logprobs,
            token_versions=tokens.versions,
            prompt_length=self.prompt_length,
            turns=self.turns,
            reward=None if failed else self.reward,
            reward_components=self.components,
            success=None if failed else self.success,
            termination=ending.termination,
            truncated=ending.truncated,
            failure_class=ending.failure_class,
            failure_message=ending.failure_message,
            messages=self.messages,
            final_state=next((m["content"] for m in reversed(self.messages) if m["role"] != "assistant"), ""),
            submitted_at=self.submitted_at,
            started_at=self.submitted_at,
            finished_at=finished_at,
            reset_s=self.reset_s,
            environment_s=self.environment_s,
            generation_s=self.generation_s,
            sequence_starts=tokens.sequence_starts,
        )
