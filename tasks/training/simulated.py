"""A learner without a model: an update takes the time that its tokens imply, and publishes versions that hold nothing.

It stands in for `tasks.training.learner.Learner` beside simulated engines, so that the real control plane runs over it:
collect, update, publish, checkpoint, resume. A forward and backward pass takes 6 FLOPs per parameter and token.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from resources.object_store import ObjectStore
from resources.policy.tokenizer_only import tokenizer_files
from tasks.training.config import TrainingConfig
from tasks.training.row import TrainingRow
from tasks.training.update_report import UpdateReport

if TYPE_CHECKING:
    import torch

FORMAT = 1
FLOPS_PER_PARAMETER_AND_TOKEN = 6.0


class SimulatedLearner:
    """Owns a version number. One thread at a time."""

    needs_components = False
    """No algorithm looks at its rewards."""
    adapter = None
    """Versions hold nothing, whatever ``training.lora`` says."""

    def __init__(
        self,
        model_directory: str | Path,
        config: TrainingConfig,
        *,
        seed: int,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            model_directory: only its tokenizer's files are read; they are published with every version.
            wait: takes seconds of the machine.
        """
        self.version = 0
        self.optimizer_step = 0
        self._config, self._figures = config, config.simulation
        self._directory, self._seed, self._wait = Path(model_directory), seed, wait

    def update(
        self,
        rows: Sequence[TrainingRow],
        version: int,
        *,
        num_families: int | None = None,
        max_staleness: int | None = None,
    ) -> UpdateReport:
        """Take as long as training on the rows would; the learner then holds ``version + 1``.

        Raises ValueError for a batch that is not the next one (nothing has changed then).
        """
        if version != self.version:
            raise ValueError(
                f"the learner holds version {self.version}; batch {version} is not the next one to train on"
            )
        started = time.perf_counter()
        num_tokens = sum(len(row.token_ids) for row in rows) * self._config.epochs
        figures = self._figures
        flops = FLOPS_PER_PARAMETER_AND_TOKEN * figures.num_parameters * num_tokens
        self._pass(flops / (figures.flops_per_s * figures.compute_efficiency))
        steps = min(self._config.minibatches, len(rows)) * self._config.epochs
        self.version = version + 1
        self.optimizer_step += steps
        update_s = time.perf_counter() - started
        metrics = {
            **_rewards(rows),
            **_staleness(rows, version),
            "optimizer_steps": steps,
            "optimizer_steps/total": self.optimizer_step,
            "tokens/processed": num_tokens,
            "tokens_per_s": num_tokens / max(update_s, 1e-9),
            "time/learner_s": update_s,
        }
        return UpdateReport(self.version, metrics, steps)

    def tensors(self) -> dict[str, torch.Tensor]:
        """One small tensor that tells versions apart; takes as long as pushing the configured size would."""
        import torch

        if self._figures.publish_bytes_per_s is not None:
            self._pass(self._figures.weight_bytes / self._figures.publish_bytes_per_s)
        return {"simulated.version": torch.full((64,), self.version, dtype=torch.int64)}

    def files(self, base: str | None = None) -> dict[str, bytes]:
        """The policy's tokenizer and configuration files."""
        assert base is None, "nothing is beside a base"
        return tokenizer_files(self._directory)

    def save(self, store: ObjectStore, prefix: str) -> None:
        """Write a checkpoint under ``prefix``: ``state.json``."""
        counters = {"seed": self._seed, "version": self.version, "optimizer_step": self.optimizer_step}
        store.put_json(f"{prefix}/state.json", {"format": FORMAT, "backend": "simulated", "counters": counters})

    def restore(self, store: ObjectStore, prefix: str) -> None:
        """Go on from a checkpoint.

        Raises KeyError when there is none, ValueError when it is of another back end or seed.
        """
        state: dict[str, Any] = store.get_json(f"{prefix}/state.json")
        if state.get("backend") != "simulated" or state["format"] != FORMAT:
            raise ValueError(
                f"checkpoint {store.uri(prefix)} was not written by a simulated learner of format {FORMAT}; resume "
                "with the training.backend that the run was started with"
            )
        counters = state["counters"]
        if counters["seed"] != self._seed:
            raise ValueError(
                f"checkpoint {store.uri(prefix)} was written with seed {counters['seed']}, not {self._seed}; resume "
                "with the same seed"
            )
        self.version, self.optimizer_step = counters["version"], counters["optimizer_step"]

    def _pass(self, simulated_s: float) -> None:
        self._wait(simulated_s / self._figures.time_scale)


def _rewards(rows: Sequence[TrainingRow]) -> dict[str, float]:
    by_family: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.reward is not None:
            by_family[row.family][row.rollout_id] = row.reward
    metrics = {f"reward/{family}": fmean(rewards.values()) for family, rewards in sorted(by_family.items())}
    if by_family:
        metrics["reward/mean"] = fmean(reward for rewards in by_family.values() for reward in rewards.values())
    return metrics


def _staleness(rows: Sequence[TrainingRow], version: int) -> dict[str, float]:
    lags = [version - oldest for row in rows if (oldest := row.oldest_version) is not None]
    return {"staleness/mean": fmean(lags), "staleness/max": max(lags)} if lags else {}
