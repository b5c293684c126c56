"""The learning rate of an update."""

from __future__ import annotations

from tasks.training.config import OptimizerConfig


def learning_rate_at(update: int, config: OptimizerConfig, total_updates: int | None) -> float:
    """Linear warm-up over ``warmup_updates``, then linear to ``final_fraction`` of the peak at the last update.

    Args:
        update: 0 for the first one.
        total_updates: the length of the whole schedule; ``config.total_updates`` goes before it. None: no decay.
    """
    total = config.total_updates or total_updates
    rate = config.learning_rate
    if update < config.warmup_updates:
        return rate * (update + 1) / config.warmup_updates
    if total is None:
        return rate
    decay_updates = total - 1 - config.warmup_updates
    progress = min(1.0, (update - config.warmup_updates) / decay_updates) if decay_updates > 0 else 1.0
    return rate * (1.0 - (1.0 - config.final_fraction) * progress)
