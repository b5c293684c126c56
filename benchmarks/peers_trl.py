"""TRL's side of `benchmarks.peers`: GRPOTrainer with ``environment_factory``, in an environment of its own.

``python -m benchmarks.peers_trl SPEC.json RESULT.json``. What was adapted, and how, so that both sides play one game:

- *Environments.* Each rollout gets an object with one tool, ``act``, around the project's own environment and scorer
  (`benchmarks.peers_episode`); one factory a task family, chosen by the data set's ``environment`` column.
- *Actions.* TRL reads tool calls from what the tokenizer's ``parse_response`` returns. The policy writes plain actions
  (``<act>left</act>``), so `action_tokenizer` parses every turn as one call of ``act``.
- *Tokens.* The chat template given to TRL prints user and tool messages as they are, and openings and observations
  arrive rendered by the policy's own `ChatFormat`: the token sequences are those of the other sides.
- *End of an episode.* TRL asks for another turn until a turn calls no tool; a finished environment cannot say so.
  ``act`` then answers with a text longer than the completion budget, which TRL drops together with the sample's further
  turns: the only way out that costs neither a wasted generation nor trained tokens.
- *Speed.* float32, no gradient checkpointing, fused AdamW, all trajectories of an update generated together by
  ``generate`` with at most the family's ``max_new_tokens`` a turn (continuous batching, `PeerSpec.continuous_batching`,
  took nine times as long on this policy; eager attention 1.4 times), no reference model, no logging, no saving.
- *Algorithm.* Learning-rate schedule, clipping, betas and minibatches are those of the configuration. TRL's token mean
  runs over all families together, and its minibatches are drawn without regard to families: no switch changes either.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers_episode import Episode, Outcome
from benchmarks.peers_spec import PeerResult, PeerSpec, UpdateRecord, read_spec, summarise
from resources.environments.base import Message
from resources.environments.family import FamilyConfig
from resources.policy.chat_format import ChatFormat
from resources.rewards.scorers import resolve_scorer

# User and tool messages arrive rendered. The assistant branch serves TRL's checks of the template, and the dummy turn
# from which it cuts the text of a tool's answer; sampled turns are never rendered.
VERBATIM_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ call['function']['name'] }}{{ call['function']['arguments'] | tojson }}"
    "{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)


class TurnFormat:
    """The policy's chat format as text, for a trainer that tokenizes by itself."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat

    def opening(self, messages: Sequence[Message]) -> str:
        return self._text(self._chat.opening(messages))

    def continuation(self, observation: Sequence[Message], last_token_id: int) -> str:
        """What stands between a sampled action and the next one."""
        said = tuple((message["role"], message["content"]) for message in observation)
        return self._continuation(said, last_token_id)

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - one object a process, and observations repeat
    def _continuation(self, observation: tuple[tuple[str, str], ...], last_token_id: int) -> str:
        messages = [Message(role=role, content=content) for role, content in observation]
        return self._text(self._chat.continuation(messages, last_token_id))

    def _text(self, token_ids: Any) -> str:
        text = self._chat.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), type(text)
        return text


def action_tokenizer(chat: ChatFormat) -> Any:
    """The policy's tokenizer with `VERBATIM_TEMPLATE`; its ``parse_response`` reads every turn as a call of ``act``."""
    base = type(chat.tokenizer)

    class ActionTokenizer(base):
        def parse_response(self, response: Any, schema: Any = None, *, prefix: Any = None, tools: Any = None) -> Any:
            ids = [int(token_id) for token_id in response]
            arguments = {"action": chat.decode_action(ids), "last_token_id": ids[-1]}
            call = {"type": "function", "function": {"name": "act", "arguments": arguments}}
            return {"role": "assistant", "content": "", "tool_calls": [call]}

    tokenizer = ActionTokenizer.from_pretrained(chat.tokenizer.name_or_path, local_files_only=True)
    tokenizer.chat_template = VERBATIM_TEMPLATE
    # Its presence tells TRL that responses can be parsed; `parse_response` above never reads it.
    tokenizer.response_template = {}
    tokenizer.padding_side = "left"
    return tokenizer


class EpisodeSeat:
    """One rollout's environment, as TRL wants it: ``reset``, ``get_reward``, and one more public method, the tool."""

    def __init__(
        self,
        name: str,
        family: FamilyConfig,
        turns: TurnFormat,
        loop: asyncio.AbstractEventLoop,
        end: str,
        outcomes: list[Outcome],
    ) -> None:
        self._name, self._family, self._turns = name, family, turns
        self._loop, self._end, self._outcomes = loop, end, outcomes
        self._scorer = resolve_scorer(family.scorer, family.scorer_arguments)
        self._episode: Episode | None = None

    def reset(self, seed: int, **row: Any) -> str:
        self._episode = Episode(self._name, self._family, self._scorer)
        return self._turns.opening(self._loop.run_until_complete(self._episode.start(seed)))

    def act(self, action: str, last_token_id: int) -> str:
        """
        Apply an action to the environment.

        Args:
            action: What to do.
            last_token_id: Id of the last token of the turn.

        Returns:
            What the environment shows next.
        """
        assert self._episode is not None
        observation = self._loop.run_until_complete(self._episode.act(action))
        return self._end if self._episode.over else self._turns.continuation(observation, last_token_id)

    def get_reward(self) -> float:
        assert self._episode is not None
        outcome = self._loop.run_until_complete(self._episode.outcome())
        self._outcomes.append(outcome)
        return outcome.reward


def train(spec: PeerSpec) -> PeerResult:
    """Train with TRL as ``spec`` says, and write the final policy. Runs in TRL's environment."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    from tasks.training.losses.ppo_clip import CLIP_HIGH, CLIP_LOW
    from tasks.training.schedule import learning_rate_at

    torch.set_num_threads(spec.num_threads)
    chat = ChatFormat.from_directory(spec.model_directory)
    tokenizer = action_tokenizer(chat)
    turns, loop, outcomes = TurnFormat(chat), asyncio.new_event_loop(), []
    end = tokenizer.pad_token * (spec.context_length + 1)

    def factory(name: str, family: FamilyConfig) -> Any:
        return lambda: EpisodeSeat(name, family, turns, loop, end, outcomes)

    training, optimizer_config = spec.training, spec.training.optimizer
    peak = optimizer_config.learning_rate
    minibatches = training.minibatches
    steps_per_update = minibatches * training.epochs
    model = AutoModelForCausalLM.from_pretrained(spec.model_directory, dtype=torch.float32)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": optimizer_config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=peak,
        betas=optimizer_config.betas,
        eps=optimizer_config.adam_epsilon,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: learning_rate_at(step // steps_per_update, optimizer_config, spec.num_updates) / peak,
    )
    rows = [
        {"prompt": [{"role": "user", "content": ""}], "environment": name, "seed": seed}
        for update in range(spec.num_updates)
        for name, seed in spec.groups(update)
    ]
    lowest_ratio, highest_ratio = training.loss.clip_bounds(CLIP_LOW, CLIP_HIGH)
    arguments = GRPOConfig(
        output_dir=spec.output_directory,
        seed=spec.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=spec.num_updates * steps_per_update,
        per_device_train_batch_size=spec.trajectories_per_update // minibatches,
        steps_per_generation=minibatches,
        gradient_accumulation_steps=1,
        num_iterations=training.epochs,
        num_generations=spec.group_size,
        shuffle_dataset=False,
        max_completion_length=spec.context_length,
        generation_kwargs={"max_new_tokens": max(family.max_new_tokens for family in spec.families.values())},
        temperature=next(iter(spec.families.values())).temperature,
        use_transformers_continuous_batching=spec.continuous_batching,
        beta=0.0,
        loss_type="dapo",
        scale_rewards=training.advantage.scaling,
        epsilon=1.0 - lowest_ratio,
        epsilon_high=highest_ratio - 1.0,
        max_grad_norm=optimizer_config.max_grad_norm,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    updates: list[UpdateRecord] = []

    class UpdateClock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step % steps_per_update == 0:
                updates.append(summarise(outcomes, time.perf_counter(), num_sampled_tokens=sampled_tokens()))
                outcomes.clear()

    trainer = GRPOTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory={name: factory(name, family) for name, family in spec.families.items()},
        optimizers=(optimizer, schedule),
        callbacks=[UpdateClock()],
    )

    def sampled_tokens() -> int:
        # TRL's own count of what the policy sampled in the latest generation, as a mean over its trajectories.
        return round(trainer._metrics["train"]["completions/mean_length"][-1] * spec.trajectories_per_update)

    trainer.train()
    model.save_pretrained(spec.output_directory)
    chat.tokenizer.save_pretrained(spec.output_directory)
    return PeerResult(updates=updates, model_directory=spec.output_directory)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(train(read_spec(sys.argv[1])).model_dump_json())
