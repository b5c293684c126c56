"""Task families: which problem, on which hardware class, how much of it per iteration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class ProcessesConfig(BaseModel):
    """The child processes in which a family's environments run, in each rollout worker."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    max_processes: int = Field(default=8, ge=1)
    """Child processes at most; they are started when needed and play one episode after the other."""
    episodes_per_process: int = Field(default=1, ge=1)
    """Episodes that one child holds at once. Their calls run one after the other, and a call that misses its deadline
    ends all of them."""
    slot_deadline_s: float = Field(default=600.0, gt=0)
    """Longest time an episode waits for a child with room, in seconds; it then counts as failed."""


class FamilyConfig(BaseModel):
    """One task family: an environment, a reward, the class its generation runs on, and its share of each batch."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    environment: str
    """Name of a built-in environment (``frozen_lake``, ``calculator``, ``guess_number``, ``code_repair``) or adapter
    (``gymnasium``, ``textarena``, ``reasoning_gym``, ``skyrl_gym``, ``openenv``, ``tool_server``), or an import path
    ``package.module:Class``."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    hardware_class: str
    """Class of engines that generate for this family."""
    groups_per_iteration: int = Field(default=4, ge=1)
    """Groups of this family in every batch (with ``rollout.share_window``: on average over that window)."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Size of a pool of prompts, played in a new order every epoch; null: every group gets a new prompt."""
    group_size: int = Field(default=8, ge=1)
    """Trajectories that share a prompt and a seed."""
    max_new_tokens: int = Field(default=14, ge=1)
    """Tokens sampled in one turn, at most."""
    temperature: float = Field(default=1.0, ge=0.01)
    """Logits are divided by it before a token is drawn, and again in the learner. Below 0.01 engines round it up."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    scorer: str = "environment"
    """``environment`` (inline), ``exact_answer`` or ``unit_tests`` (on the reward pool), or an import path."""
    scorer_arguments: dict[str, Any] = Field(default_factory=dict)
    score_deadline_s: float = Field(default=10.0, gt=0)
    """Longest time one scoring may take, in seconds."""
    reset_deadline_s: float = Field(default=30.0, gt=0)
    """Longest time `reset` may take, in seconds."""
    step_deadline_s: float = Field(default=30.0, gt=0)
    """Longest time one `step` may take, in seconds."""
    executor: Literal["thread", "process"] = "thread"
    """Where the environment runs: in the rollout worker (its blocking calls in threads), or in child processes. A
    thread that hangs can only be abandoned; a process is killed."""
    processes: ProcessesConfig = ProcessesConfig()
    """The child processes of ``executor: process``."""
    max_concurrent_groups: int = Field(default=64, ge=1)
    """Groups of this family that may run at once."""
    redundant_groups: int = Field(default=0, ge=0)
    """Groups started beyond need; the first complete ones win."""
    redundant_members: int = Field(default=0, ge=0)
    """Members started beyond ``group_size``; the first scored ones win."""
