"""A grid world: walk over the ice to the goal, round the holes (gymnasium's FrozenLake, not slippery, rendered as
text).

The map is shown once, at the reset; later observations give the position and the four neighbour cells only. With the
whole map in every observation a small policy learned nothing.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Sequence

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from resources.environments.action_text import malformed, parse_action, tagged
from resources.environments.base import Message, StepOutcome

DIRECTIONS = ("left", "down", "right", "up")
"""In gymnasium's numbering of the actions."""
_MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_MAX_MAPS = 1000
_REMINDER = "say <act>left</act>, down, right or up"
Cell = tuple[int, int]


class FrozenLake:
    """Reward 1 at the goal, 0 in a hole (both end the episode) or at the turn limit (truncated). A malformed action
    costs 0.1 and a turn. Every map can be solved within the turn limit."""

    env_version = "1"

    def __init__(self, size: int = 4, frozen_share: float = 0.8, max_turns: int = 10) -> None:
        if not 2 <= size <= 16:
            raise ValueError(f"frozen_lake: size is {size}; it must be 2 to 16")
        if not 0.5 <= frozen_share <= 1:
            raise ValueError(
                f"frozen_lake: frozen_share is {frozen_share}; it must be 0.5 to 1 (below, few maps are solvable)"
            )
        if max_turns < 2 * (size - 1):
            raise ValueError(
                f"frozen_lake: max_turns is {max_turns}; a map of size {size} needs at least {2 * (size - 1)}"
            )
        self._size, self._frozen_share, self.max_turns = size, frozen_share, max_turns
        self._turns = 0

    async def reset(self, seed: int) -> list[Message]:
        self._map = _draw_map(seed, self._size, self._frozen_share, self.max_turns)
        self._distances = _distances_to_goal(self._map)
        self._lake = FrozenLakeEnv(desc=list(self._map), is_slippery=False)
        self._lake.reset(seed=seed % 2**32)
        self._cell: Cell = (0, 0)
        self._turns = 0
        opening = "\n".join([*self._map, self._surroundings()])
        return [
            Message(role="system", content="lake: <act>left</act>, down, right or up"),
            Message(role="user", content=opening),
        ]

    async def step(self, action: str) -> StepOutcome:
        self._turns += 1
        is_last = self._turns >= self.max_turns
        parsed = parse_action(action, ("act",))
        if parsed is None or parsed[1] not in DIRECTIONS:
            return malformed(_REMINDER, truncated=is_last)
        state, _, _, _, _ = self._lake.step(DIRECTIONS.index(parsed[1]))
        return self._arrive(divmod(int(state), self._size), is_last)

    @classmethod
    async def step_many(cls, environments: Sequence[FrozenLake], actions: Sequence[str]) -> list[StepOutcome]:
        """See `VectorEnvironment`: all moves in one computation over the lakes' cells."""
        parsed = [parse_action(action, ("act",)) for action in actions]
        names = [part[1] if part is not None and part[1] in DIRECTIONS else None for part in parsed]
        moves = np.array([(0, 0) if name is None else _MOVES[name] for name in names])
        cells = np.array([lake._cell for lake in environments])
        edges = np.array([lake._size - 1 for lake in environments])[:, None]
        outcomes = []
        for lake, name, cell in zip(environments, names, np.clip(cells + moves, 0, edges).tolist(), strict=True):
            lake._turns += 1
            is_last = lake._turns >= lake.max_turns
            if name is None:
                outcomes.append(malformed(_REMINDER, truncated=is_last))
                continue
            row, column = cell
            lake._lake.s = row * lake._size + column
            outcomes.append(lake._arrive((row, column), is_last))
        return outcomes

    def _arrive(self, cell: Cell, is_last: bool) -> StepOutcome:
        self._cell = cell
        if self._at(cell) in "GH":
            solved = self._at(cell) == "G"
            outcome = {"outcome": float(solved)}
            return StepOutcome([], reward=float(solved), terminated=True, success=solved, components=outcome)
        observation = [] if is_last else [Message(role="user", content=self._surroundings())]
        return StepOutcome(observation, truncated=is_last, success=False if is_last else None)

    async def close(self) -> None:
        pass

    def judgement(self) -> None:
        """The environment knows the outcome."""
        return None

    def expert_action(self) -> str:
        """The first step of a shortest way to the goal (the first such direction in the order left, down, right,
        up)."""
        best = min(DIRECTIONS, key=lambda direction: self._distances.get(self._neighbour(direction), 10**6))
        return tagged("act", best)

    def random_action(self, rng: random.Random) -> str:
        return tagged("act", rng.choice(DIRECTIONS))

    def _surroundings(self) -> str:
        row, column = self._cell
        cells = (f"{direction} {self._at(self._beside(direction))}" for direction in DIRECTIONS)
        return f"{row} {column} " + " ".join(cells)

    def _beside(self, direction: str) -> Cell:
        step = _MOVES[direction]
        return (self._cell[0] + step[0], self._cell[1] + step[1])

    def _neighbour(self, direction: str) -> Cell:
        """Where a move leads: into a wall means staying."""
        cell = self._beside(direction)
        return self._cell if self._at(cell) == "#" else cell

    def _at(self, cell: Cell) -> str:
        row, column = cell
        inside = 0 <= row < self._size and 0 <= column < self._size
        return self._map[row][column] if inside else "#"


@functools.lru_cache(maxsize=1024)  # the siblings of a group draw the same map
def _draw_map(seed: int, size: int, frozen_share: float, max_turns: int) -> tuple[str, ...]:
    """A random map whose shortest way fits in the turn limit: gymnasium ensures *a* way, not a short one."""
    rng = random.Random(seed)
    for _ in range(_MAX_MAPS):
        rows = tuple(generate_random_map(size, frozen_share, seed=rng.randrange(2**32)))
        if _distances_to_goal(rows)[(0, 0)] <= max_turns:
            return rows
    raise RuntimeError(f"frozen_lake: none of {_MAX_MAPS} maps can be solved in {max_turns} turns; raise max_turns")


def _distances_to_goal(rows: Sequence[str]) -> dict[Cell, int]:
    """Moves to the goal from every cell from which it can be reached without a hole."""
    size = len(rows)
    goal = (size - 1, size - 1)
    distances, queue = {goal: 0}, deque([goal])
    while queue:
        row, column = queue.popleft()
        for down, right in _MOVES.values():
            cell = (row + down, column + right)
            inside = 0 <= cell[0] < size and 0 <= cell[1] < size
            if inside and cell not in distances and rows[cell[0]][cell[1]] != "H":
                distances[cell] = distances[(row, column)] + 1
                queue.append(cell)
    return distances
