"""What has an engine done since its start? Counted alike by every back end."""

from __future__ import annotations

from dataclasses import dataclass

from resources.engines.base import EngineStats


@dataclass(slots=True)
class StepCounters:
    """Fields as in `EngineStats`."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    num_steps: int = 0
    busy_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def count(
        self, elapsed_s: float, *, num_decoded: int, num_prefilled: int, num_sampled: int, num_steps: int = 1
    ) -> None:
        """Steps that were alike. A step computes both kinds of rows together; its time is shared out by their numbers.

        Args:
            elapsed_s: of all steps, in seconds of the machine.
            num_decoded: rows of a step that were single next tokens.
            num_prefilled: rows of a step that were pieces of histories.
            num_sampled: tokens of all steps.
        """
        prefill_share = num_prefilled / max(1, num_prefilled + num_decoded)
        self.num_steps += num_steps
        self.generated_tokens += num_sampled
        self.prefilled_tokens += num_steps * num_prefilled
        self.busy_s += elapsed_s
        self.prefill_s += elapsed_s * prefill_share
        self.decode_s += elapsed_s * (1.0 - prefill_share)

    def stats(
        self,
        *,
        engine: str,
        hardware_class: str,
        version: int,
        suspended: bool,
        num_running: int,
        num_waiting: int,
        num_slots: int,
        **extra: float,
    ) -> EngineStats:
        """These figures beside the engine's present state."""
        return EngineStats(
            engine=engine,
            hardware_class=hardware_class,
            version=version,
            suspended=suspended,
            num_running=num_running,
            num_waiting=num_waiting,
            num_slots=num_slots,
            generated_tokens=self.generated_tokens,
            prefilled_tokens=self.prefilled_tokens,
            cached_tokens=self.cached_tokens,
            recomputed_tokens=self.recomputed_tokens,
            busy_s=self.busy_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            extra={"num_steps": float(self.num_steps), **extra},
        )
