"""How does a Prefect task reach the hardware class that it names?

Every stage task carries exactly one tag ``pool:<class>``. The runner submits it to the Dask cluster at an address, with
the Dask resource of that class (or of the fallback that serves it), so that it lands on one of its workers and on no
other. What Dask itself cannot run, because a worker died or because no worker of the class is left, becomes a crashed
task run with a clear message: nobody else would set that state. What happens in the worker is in `flows.pool_task`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID, uuid4

import distributed
import httpx
from distributed.scheduler import KilledWorker
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, RunInput, State
from prefect.context import (
    AssetContext,
    FlowRunContext,
    TagsContext,
    TaskRunContext,
)
from prefect.exceptions import PrefectHTTPStatusError
from prefect.futures import PrefectFuture, PrefectWrappedFuture
from prefect.states import Crashed
from prefect.task_runners import TaskRunner
from prefect.tasks import Task
from prefect.utilities.collections import visit_collection
from prefect.utilities.engine import collect_task_run_inputs_sync

from flows.pool_task import SerializedContext, run_pool_task
from resources.failures import InfrastructureFailure

R = TypeVar("R")

TAG_PREFIX = "pool:"
CONNECT_S = 10.0
"""Longest wait for the scheduler to answer."""
NUM_REPORTS = 3
"""Attempts to tell the server of a crash, while it books what the worker had announced."""


def hardware_class_of(task: Task[Any, Any]) -> str:
    """The hardware class that a task names.

    Raises:
        ValueError: the task has no tag ``pool:<class>``, or several.
    """
    classes = sorted(tag.removeprefix(TAG_PREFIX) for tag in task.tags if tag.startswith(TAG_PREFIX))
    if len(classes) != 1 or not classes[0]:
        raise ValueError(
            f"task {task.name!r} has the pool tags {[TAG_PREFIX + name for name in classes]}; it needs exactly one, "
            "e.g. @task(tags={'pool:learner'})"
        )
    return classes[0]


class PoolFuture(PrefectWrappedFuture[R, distributed.Future]):
    """Future of a task run on a pool. Knows enough of the run to report a crash that happened below Prefect."""

    def __init__(
        self,
        task_run_id: UUID,
        wrapped_future: distributed.Future,
        task: Task[Any, Any],
        hardware_class: str,
        flow_run_id: UUID | None,
    ) -> None:
        super().__init__(task_run_id=task_run_id, wrapped_future=wrapped_future)
        self._task = task
        self._hardware_class = hardware_class
        self._flow_run_id = flow_run_id

    def wait(self, timeout: float | None = None) -> None:
        """Wait for a final state, at most ``timeout`` seconds; a crash is a final state too."""
        try:
            self._settle(timeout)
        except TimeoutError:
            return

    def result(self, timeout: float | None = None, raise_on_failure: bool = True) -> R:
        """The task's result.

        Raises:
            TimeoutError: no result within ``timeout`` seconds; the task runs on.
            InfrastructureFailure: Dask could not run the task; its run is set to Crashed.
        """
        self._settle(timeout)
        assert self._final_state is not None
        return self._final_state.result(raise_on_failure=raise_on_failure, _sync=True)  # type: ignore[return-value]

    def _settle(self, timeout: float | None) -> None:
        if self._final_state is not None:
            return
        try:
            outcome = self._wrapped_future.result(timeout=timeout)
        except distributed.TimeoutError as error:
            if not self._wrapped_future.done():
                raise TimeoutError(
                    f"task run {self._task.name} ({self.task_run_id}) did not complete within {timeout} s"
                ) from error
            self._crash(error)
        except Exception as error:  # noqa: BLE001 - the task's own errors arrive inside a state: this one is Dask's
            self._crash(error)
        else:
            assert isinstance(outcome, State), outcome
            self._final_state = outcome

    def _crash(self, cause: Exception) -> None:
        message = f"task {self._task.name} could not run on hardware class {self._hardware_class}: {_explain(cause)}"
        failure = InfrastructureFailure(message)
        failure.__cause__ = cause
        self._final_state = Crashed(message=message, data=failure)
        self._report(Crashed(message=message))

    def _report(self, state: State[Any]) -> None:
        """Tell the server. A worker that died has announced the run, or has not, or its announcement, which the server
        books when it comes to it, arrives while this is going on."""
        client = get_client(sync_client=True)
        for attempt in range(NUM_REPORTS):
            try:
                client.set_task_run_state(self.task_run_id, state, force=True)
                return
            except PrefectHTTPStatusError as error:
                if error.response.status_code != httpx.codes.NOT_FOUND:
                    raise
            try:
                client.create_task_run(
                    self._task,
                    self._flow_run_id,
                    dynamic_key=str(self.task_run_id),
                    id=self.task_run_id,
                    name=f"{self._task.name}-{str(self.task_run_id)[:3]}",
                    state=state,
                )
                return
            except PrefectHTTPStatusError as error:
                if error.response.status_code != httpx.codes.CONFLICT or attempt == NUM_REPORTS - 1:
                    raise


def _explain(cause: Exception) -> str:
    if isinstance(cause, KilledWorker):
        return f"its worker {cause.last_worker.name} ({cause.last_worker.address}) died"
    return f"{type(cause).__name__}: {cause}"


def _without_pool_tag(task: Task[Any, Any]) -> Task[Any, Any]:
    """The task as it runs: the tag has done its work when the class is chosen.

    Prefect acquires and releases a concurrency limit for every tag of a task run, whether a limit exists or not; on
    SQLite such a call meets a lock now and then, and its client tries again after two seconds. Dask's resources limit
    what runs on a class already.
    """
    return task.with_options(tags=[tag for tag in task.tags if not tag.startswith(TAG_PREFIX)])


@dataclass(frozen=True, slots=True)
class Connection:
    """A client of the scheduler that the flows of a process share, instead of each connecting anew."""

    client: distributed.Client
    last_of_task: dict[str, distributed.Future] = field(default_factory=dict)
    """The newest future of every task name. Dask keeps books about a group of tasks while one of them is held, and
    opens new books, which it keeps for ever, when a group comes back: held futures keep a scheduler's memory flat."""


class PoolTaskRunner(TaskRunner[PoolFuture[Any]]):
    """Runs the tasks of a flow on the Dask cluster at ``address``, each on the hardware class that its tag names.

    A runner of our own on Prefect's public base class, not a `prefect_dask.DaskTaskRunner`: that one serialises the
    settings and the flow anew for every task and rebuilds them in the worker. Here the context is serialised once a
    flow run, and a worker rebuilds the settings only when they change.

    Args:
        address: address of the Dask scheduler, ``tcp://host:port``.
        serving: which class serves each class (`resources.pools.preflight.ServingClasses.serving`); a class that is
            not in it serves itself.
        connection: to that scheduler, used and left open; None: every flow connects anew.
    """

    def __init__(
        self, address: str, serving: Mapping[str, str] | None = None, connection: Connection | None = None
    ) -> None:
        super().__init__()
        self.address = address
        self.serving = dict(serving or {})
        self._shared = connection
        self._own: Connection | None = None
        self._context: tuple[object, SerializedContext] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolTaskRunner) and (self.address, self.serving) == (other.address, other.serving)

    __hash__ = None  # type: ignore[assignment]

    def duplicate(self) -> PoolTaskRunner:
        """A runner with the same settings for one flow run."""
        return PoolTaskRunner(self.address, self.serving, self._shared)

    def __reduce__(self) -> tuple[Any, ...]:
        # It travels to the workers with the flow; a connection does not.
        return PoolTaskRunner, (self.address, self.serving)

    def __exit__(self, *exception: Any) -> None:
        if self._own is not None:
            self._own.client.close()
        self._own = None
        self._context = None
        super().__exit__(*exception)

    def submit(  # type: ignore[override]
        self,
        task: Task[Any, Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None = None,
        dependencies: dict[str, set[RunInput]] | None = None,
    ) -> PoolFuture[Any]:
        """Submit a task to the workers of its class.

        Raises:
            ValueError: the task does not name exactly one hardware class.
            InfrastructureFailure: no scheduler answers at the runner's address.
        """
        if not self._started:
            raise RuntimeError("the task runner must be started before it takes tasks: it belongs to a flow")
        hardware_class = hardware_class_of(task)
        task_run_id = uuid4()
        inputs: dict[str, set[Any]] = {
            name: set(collect_task_run_inputs_sync(value)) for name, value in parameters.items()
        }
        for name, upstream in (dependencies or {}).items():
            inputs[name] = inputs.get(name, set()) | upstream
        connection = self._connected()
        future = connection.client.submit(
            run_pool_task,
            _without_pool_tag(task),
            self._serialized_context(),
            AssetContext.from_task_and_inputs(
                task=task, task_run_id=task_run_id, task_inputs=inputs, copy_to_child_ctx=True
            ).serialize(),
            key=(task.name, str(task_run_id)),
            pure=False,
            resources={self.serving.get(hardware_class, hardware_class): 1},
            task_run_id=task_run_id,
            parameters=_as_dask_futures(parameters),
            wait_for=_as_dask_futures(list(wait_for)) if wait_for else None,
            dependencies=inputs,
        )
        connection.last_of_task[task.name] = future
        flow_run = _flow_run()
        return PoolFuture(task_run_id, future, task, hardware_class, flow_run.id if flow_run else None)

    def _connected(self) -> Connection:
        """A client of the scheduler at ``address``; a default client of the process is never used in its place."""
        if self._shared is not None:
            return self._shared
        if self._own is None:
            try:
                client = distributed.Client(self.address, set_as_default=False, timeout=CONNECT_S)
            except OSError as error:
                raise InfrastructureFailure(
                    f"no Dask scheduler answers at {self.address} within {CONNECT_S:g} s"
                ) from error
            self._own = Connection(client)
        return self._own

    def _serialized_context(self) -> SerializedContext:
        flow_run, parent = _flow_run(), TaskRunContext.get()
        tags = TagsContext.get().current_tags
        valid_for = (flow_run and flow_run.id, parent and parent.task_run.id, frozenset(tags))
        if self._context is None or self._context[0] != valid_for:
            self._context = valid_for, SerializedContext.take()
        return self._context[1]


def _flow_run() -> FlowRun | None:
    context = FlowRunContext.get()
    return context.flow_run if context else None


def _as_dask_futures(value: Any) -> Any:
    """The value with the Dask future in place of each of ours: Dask then waits for it and hands over its state."""
    return visit_collection(
        value, visit_fn=lambda each: each.wrapped_future if isinstance(each, PoolFuture) else each, return_data=True
    )
