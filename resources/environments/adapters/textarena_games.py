"""TextArena's games for one player (textarena 0.7): the policy reads what is new, and answers with a move."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from resources.environments.action_text import INVALID_ACTION_PENALTY
from resources.environments.adapters.global_random import GlobalRandom
from resources.environments.adapters.packages import adapter_version, import_optional
from resources.environments.base import Message, StepOutcome
from resources.environments.seeds import narrow_seed


class TextArenaGame:
    """The reward is the game's own, at its end; a move that the game calls invalid costs 0.1 and a turn (the second in
    a row usually ends the game). Won: a reward of at least ``solved_reward``.

    Ends by the game's own turn limit count as truncated. Games draw from the global generator (see `GlobalRandom`);
    some load word lists, a few want nltk's corpora and fail without them.
    """

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        solved_reward: float = 1.0,
    ) -> None:
        """
        Args:
            id: as registered (``GuessTheNumber-v0``); its wrappers are left off.
            kwargs: of ``textarena.make``.
            max_turns: None: enough for the game's own turn limit with an invalid move before each.
            solved_reward: a final reward of at least this is success.

        Raises ValueError for an id that is unknown, or that is not for one player.
        """
        self._id, self._kwargs, self._solved_reward = id, dict(kwargs or {}), solved_reward
        limit = _turn_limit(id, json.dumps(self._kwargs))
        if max_turns is None and limit is None:
            raise ValueError(f"{id} has no turn limit of its own; set max_turns")
        self.max_turns: int = max_turns or 2 * (limit or 0) + 2
        self.env_version = adapter_version("1", "textarena")
        self._game: Any = None

    def reset(self, seed: int) -> list[Message]:
        self._random = GlobalRandom(narrow_seed(seed))
        self._turns = 0
        with self._random.taken_over():
            self._game = _make(self._id, self._kwargs)
            self._game.reset(num_players=1, seed=narrow_seed(seed))
            return [Message(role="user", content=self._news())]

    def step(self, action: str) -> StepOutcome:
        self._turns += 1
        state = self._game.state
        errors = getattr(state, "error_count", 0)
        with self._random.taken_over():
            done, _ = self._game.step(action if "[" in action or "]" in action else f"[{action}]")
            news = "" if done else self._news()
        info = state.game_info[0]
        is_invalid = bool(info.get("invalid_move")) or getattr(state, "error_count", 0) > errors
        is_last = not done and self._turns >= self.max_turns
        reward = float((state.rewards or {}).get(0, 0.0)) if done else 0.0
        solved = done and reward >= self._solved_reward
        out_of_turns = done and not solved and not is_invalid and _is_out_of_turns(state)
        components = {"outcome": reward} if done else {}
        if is_invalid:
            reward += INVALID_ACTION_PENALTY
            components["invalid_action"] = INVALID_ACTION_PENALTY
        return StepOutcome(
            [] if done or is_last else [Message(role="user", content=news)],
            reward=reward,
            terminated=done and not out_of_turns,
            truncated=is_last or out_of_turns,
            success=solved if done or is_last else None,
            invalid_action=is_invalid,
            components=components,
        )

    def _news(self) -> str:
        """What the game has said since the last move; the player's own words are no news."""
        _, messages = self._game.get_observation()
        own = self._game.state.current_player_id
        return "\n".join(str(text).strip() for sender, text, *_ in messages if sender != own) or "(nothing new)"


@functools.lru_cache(maxsize=128)
def _turn_limit(id: str, kwargs: str) -> int | None:
    """The game's turn limit; found out once, by starting a game."""
    textarena = import_optional("textarena", "textarena")
    if id not in textarena.envs.registration.ENV_REGISTRY:
        raise ValueError(f"textarena has no game {id!r}; textarena.pprint_registry_detailed() lists them")
    try:
        with GlobalRandom(0).taken_over():
            game = _make(id, json.loads(kwargs))
            game.reset(num_players=1, seed=0)
    except Exception as error:
        raise ValueError(
            f"textarena cannot start {id!r} for one player ({type(error).__name__}: {error}); choose a game for one "
            "player whose data is installed"
        ) from error
    limit = getattr(game.state, "max_turns", None)
    return int(limit) if limit else None


def _make(id: str, kwargs: Mapping[str, Any]) -> Any:
    textarena = import_optional("textarena", "textarena")
    game = textarena.make(id, **kwargs)
    while isinstance(game, textarena.Wrapper):  # they repeat the whole history in every observation
        game = game.env
    return game


def _is_out_of_turns(state: Any) -> bool:
    return state.max_turns is not None and state.turn >= state.max_turns
