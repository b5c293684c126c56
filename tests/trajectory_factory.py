"""Small valid trajectories for tests: two turns, every field filled, any field overridden."""

from __future__ import annotations

from typing import Any

import numpy as np

from resources.trajectories.trajectory import Trajectory, Turn


def make_trajectory(member: int = 0, *, num_tokens: int = 10, **overrides: Any) -> Trajectory:
    """Prompt of 3, two sampled, one observed, the rest sampled; the token ids say which member it is."""
    mask = np.array([False] * 3 + [True] * 2 + [False] + [True] * (num_tokens - 6))
    trajectory_id = f"run/calculator-000007/{member}/0"
    fields: dict[str, Any] = {
        "run_id": "run",
        "trajectory_id": trajectory_id,
        "rollout_id": trajectory_id,
        "attempt": 0,
        "family": "calculator",
        "env_id": "calculator",
        "env_version": "1",
        "group_id": "calculator-000007",
        "member": member,
        "group_size": 4,
        "seed_env": 7,
        "seed_sampling": 2**62 + member,
        "split": "train",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "tokenizer_hash": "t0",
        "template_hash": "c0",
        "token_ids": np.arange(num_tokens, dtype=np.int32) + 1000 * member,
        "loss_mask": mask,
        "behaviour_logprobs": np.where(mask, np.float32(-0.1) - np.float32(member), np.float32(0)),
        "token_versions": np.where(mask, 12, -1).astype(np.int32),
        "prompt_length": 3,
        "turns": [
            Turn(0, 3, 5, "compute-0", "compute", "stop", 0.0, 0, 0.1, 0.2, 0.3, 0.4, tool_name="calculator"),
            Turn(5, 6, num_tokens, "compute-0", "compute", "stop", 1.0, 5, 0.1, 0.2, 0.3, 0.4, invalid_action=True),
        ],
        "reward": 0.9,
        "reward_components": {"outcome": 1.0, "invalid_action": -0.1},
        "success": True,
        "termination": "terminated",
        "truncated": False,
        "messages": [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": 'é "42"\n'}],
        "final_state": "42",
        "submitted_at": 1.7e9,
        "started_at": 1.7e9 + 1,
        "finished_at": 1.7e9 + 2.5,
        "reset_s": 0.01,
        "environment_s": 0.8,
        "generation_s": 1.2,
    }
    return Trajectory(**(fields | overrides))


def assert_same(left: Trajectory, right: Trajectory) -> None:
    """Equal in every field, arrays with their types."""
    for name in Trajectory.__slots__:
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, name
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            assert a == b, name
