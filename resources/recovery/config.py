"""How far does a run go to save itself before it ends?"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class RecoveryConfig(BaseModel):
    """What happens when a worker process of the run dies, hangs or is worn out."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    max_restarts: int = Field(default=5, ge=0)
    """Actors of one role (engine, learner, environment) that may be rebuilt within ``restart_window_s``; one more loss
    ends the run. 0: the first loss ends it."""
    restart_window_s: float = Field(default=600.0, gt=0)
    """Restarts older than this are forgiven, in seconds."""
    replacement_wait_s: float = Field(default=60.0, gt=0)
    """Longest wait for a worker process that can host a lost actor, in seconds. After it the run goes on with engines
    of the class or of its fallbacks, or with the other rollout workers; without any it ends."""
    build_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time the constructor of an actor may take (imports, weights), in seconds."""
    max_stage_retries: int = Field(default=2, ge=0)
    """How often a stage that lost its worker, or an actor that it called, is run again."""
    health_period_s: float = Field(default=2.0, gt=0)
    """Period at which engines and rollout workers are asked how they are, in seconds."""
    answer_deadline_s: float = Field(default=15.0, gt=0)
    """A rollout worker that leaves such a question unanswered for so long, twice in a row, is restarted; an engine is
    probed."""
    probe_deadline_s: float = Field(default=60.0, gt=0)
    """An engine under suspicion that generates no token within this time is restarted, in seconds."""
