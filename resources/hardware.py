"""Hardware classes: the tags by which work finds the machines that fit it (RollArt, arXiv 2512.22560, section 4)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Role = Literal["engine", "learner", "environment", "control"]
"""What a worker of a class does: hosts an engine, the learner, environments, or the group queue and gate."""


class HardwareClass(BaseModel):
    """One class of machines. Its name is the tag: workers carry ``resources={name: slots}``, stages ``pool:<name>``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    role: Role
    """What workers of this class host."""
    num_workers: int = Field(default=1, ge=0)
    """Worker processes that an embedded cluster starts (one per accelerator slot; ignored with ``pools.address``)."""
    fallback: tuple[str, ...] = ()
    """Compatible classes to use, in order, when no worker of this class exists. Every use is counted and logged."""
    torch_threads: int = Field(default=1, ge=1)
    """Torch and OMP threads in each worker process."""
    device: str = "cpu"
    """Torch device of engines and learners on this class: ``cpu``, ``cuda``, ``cuda:0``, ..."""


def quickstart_classes() -> dict[str, HardwareClass]:
    """The classes of a one-machine run. ``compute`` and ``bandwidth`` stand in for each other."""
    return {
        "compute": HardwareClass(role="engine", fallback=("bandwidth",)),
        "bandwidth": HardwareClass(role="engine", fallback=("compute",)),
        "learner": HardwareClass(role="learner"),
        "cpu": HardwareClass(role="environment"),
        "control": HardwareClass(role="control"),
    }


class PoolsConfig(BaseModel):
    """The Dask worker pools of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    address: str | None = None
    """Address of a standing Dask scheduler (``tcp://host:port``). None: start an embedded cluster on 127.0.0.1."""
    classes: dict[str, HardwareClass] = Field(default_factory=quickstart_classes)
    """Hardware classes by name."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait, in seconds, for the workers of every class to register."""
    no_workers_timeout_s: float = Field(default=30.0, gt=0)
    """A stage whose class has lost all of its workers fails after this many seconds instead of waiting for ever."""

    @field_validator("address")
    @classmethod
    def _address_has_a_scheme(cls, value: str | None) -> str | None:
        if value is not None and "://" not in value:
            raise ValueError(f"pools.address is {value!r}; it must look like tcp://host:port, or be left out")
        return value

    @model_validator(mode="after")
    def _roles_are_complete(self) -> PoolsConfig:
        for name, hardware_class in self.classes.items():
            for other in hardware_class.fallback:
                if other not in self.classes:
                    raise ValueError(
                        f"pools.classes.{name}.fallback names {other!r}, which is no class; "
                        f"known: {sorted(self.classes)}"
                    )
                if self.classes[other].role != hardware_class.role:
                    raise ValueError(
                        f"pools.classes.{name}.fallback names {other!r}, whose role is {self.classes[other].role!r}, "
                        f"not {hardware_class.role!r}: a fallback must host the same role"
                    )
        for role in ("engine", "learner", "environment", "control"):
            if not self.of_role(role):
                raise ValueError(f"pools.classes has no class with role {role!r}; add one")
        for role in ("learner", "control"):
            if len(self.of_role(role)) > 1:
                raise ValueError(
                    f"pools.classes has several classes with role {role!r}: {self.of_role(role)}; keep one"
                )
        return self

    def of_role(self, role: str) -> list[str]:
        """Names of the classes that host a role, in the order in which they are written."""
        return [name for name, hardware_class in self.classes.items() if hardware_class.role == role]
