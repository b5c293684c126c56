"""A LoRA adapter (arXiv 2106.09685) as PEFT keeps it, and the policy that it makes of its base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PREFIX = "base_model.model."
"""PEFT's names are the model's behind this."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


def merged_matrix(base: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scaling: float) -> torch.Tensor:
    """W + scaling B A, float32 [out, in], of W [out, in], A [rank, in] and B [out, rank]. Changes none of them."""
    return base.float() + scaling * (up.float() @ down.float())


class MergedTensors(Mapping[str, "torch.Tensor"]):
    """The policy's tensors by its own names. A matrix beside which the adapter stands is merged each time that it is
    read, from the base as it is: no version builds on another one, and the policy is never in memory twice."""

    def __init__(
        self, base: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], scaling: float, what: str
    ) -> None:
        """``what`` is the adapter's name in errors. Raises ValueError for one that does not fit the base."""
        self._base, self._scaling = base, scaling
        self._pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        unmatched = []
        for name in adapter:
            target = f"{name.removeprefix(PREFIX).removesuffix(DOWN)}.weight"
            if name.endswith(UP) and name.removesuffix(UP) + DOWN in adapter:
                continue
            up = adapter.get(name.removesuffix(DOWN) + UP)
            if not (name.startswith(PREFIX) and name.endswith(DOWN) and target in base) or up is None:
                unmatched.append(name)
                continue
            shapes = tuple(base[target].shape), tuple(adapter[name].shape), tuple(up.shape)
            if shapes[0] != (shapes[2][0], shapes[1][1]) or shapes[1][0] != shapes[2][1]:
                raise ValueError(
                    f"{what} does not fit its base: {target} has shape {shapes[0]}, and A {shapes[1]}, B {shapes[2]}"
                )
            self._pairs[target] = adapter[name], up
        if unmatched:
            raise ValueError(
                f"{what} does not fit its base: {sorted(unmatched)[:4]} ({len(unmatched)} in all) are no pair of A and "
                "B beside one of its matrices"
            )

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._pairs:
            return self._base[name]
        return merged_matrix(self._base[name], *self._pairs[name], self._scaling)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)
