"""How does the group queue stand? Its figures, for whoever watches a run."""

from __future__ import annotations

from typing import Any

from resources.rollout.dispatch import Dispatcher
from resources.rollout.staleness import StalenessGate


def queue_stats(gate: StalenessGate, dispatcher: Dispatcher, num_awaiting_score: int, now: float) -> dict[str, Any]:
    """JSON-able: versions, groups of each family, rollout workers, circuit breakers. ``now``: of the queue's clock."""
    return {
        "version": gate.version,
        "next_batch": gate.next_batch,
        "num_queued": dispatcher.num_queued(),
        "num_awaiting_score": num_awaiting_score,
        "num_ignored": gate.num_ignored,
        "families": {
            name: {
                "running": len(family.running),
                "complete": len(family.complete),
                "waiting": len(family.waiting),
                "accepted": gate.admission.accepted(name),
                "owed": gate.shares.families[name].owed,
                "cursor": family.cursor,
                "counts": dict(family.counts),
            }
            for name, family in gate.families.items()
        },
        "workers": {
            worker_id: {
                "held": len(record.held),
                "capacity": record.capacity,
                "silent_s": round(now - record.last_heard, 3),
            }
            for worker_id, record in dispatcher.workers.items()
        },
        "breakers": {name: breaker.stats() for name, breaker in sorted(dispatcher.breakers.items())},
    }
