"""The step thread of the local engine: takes up what other threads ask for between two steps, and answers once."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from resources.engines.answers import AnswerBox
from resources.engines.local_stepper import Stepper, Ticket
from resources.engines.local_weights import FusedWeights
from resources.failures import EngineFailure


class StepThread:
    """Runs steps while there is work and the engine is not suspended. Its methods may be called from any thread."""

    def __init__(self, stepper: Stepper, threads: int) -> None:
        self._stepper = stepper
        self._threads = threads
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._arrivals: deque[Ticket] = deque()
        """Submitted, not taken up yet."""
        self._waiting: deque[Ticket] = deque()
        """Taken up, without a slot; in order of arrival."""
        self._commands: deque[tuple[Callable[[], Any], asyncio.Future[Any] | None]] = deque()
        self._answers = AnswerBox()
        self._closing = False
        self.suspended = False
        self.failure: str | None = None
        """Why no request can be answered any more; None while the thread lives."""
        self._thread = threading.Thread(target=self._run, name=f"engine-{stepper.engine}", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        return len(self._stepper.tickets)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._arrivals)

    def answer_to(self, future: asyncio.Future[Any]) -> Callable[[Any], None]:
        """What a ticket calls, from the step thread, to settle a future of any event loop."""
        return lambda result: self._answers.put(future, result)

    def submit(self, ticket: Ticket) -> None:
        """Answered exactly once, with a Generation or an EngineFailure. Raises EngineFailure when it is gone."""
        with self._lock:
            self._check_alive()
            self._arrivals.append(ticket)
        self._wake.set()

    def abort(self, request_id: str) -> None:
        self._post_if_alive(lambda: self._abort(request_id))

    def release(self, trajectory_id: str) -> None:
        self._post_if_alive(lambda: self._release(trajectory_id))

    def suspend(self, done: asyncio.Future[Any]) -> None:
        self._post(lambda: self._set_suspended(True), done)

    def resume(self, done: asyncio.Future[Any]) -> None:
        self._post(lambda: self._set_suspended(False), done)

    def switch(self, weights: FusedWeights, done: asyncio.Future[Any]) -> None:
        """Go on under other weights; the answer is the number of tokens whose KV became invalid."""
        self._post(lambda: self._switch(weights), done)

    def close(self) -> None:
        """Ask the thread to end; whatever is still unanswered fails with EngineFailure."""
        with self._lock:
            self._closing = True
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended within the time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _post(self, act: Callable[[], Any], done: asyncio.Future[Any] | None = None) -> None:
        with self._lock:
            self._check_alive()
            self._commands.append((act, done))
        self._wake.set()

    def _post_if_alive(self, act: Callable[[], Any]) -> None:
        with self._lock:
            if self.failure is not None or self._closing:
                # A dead engine knows no request and no trajectory.
                return
            self._commands.append((act, None))
        self._wake.set()

    def _check_alive(self) -> None:
        if self.failure is not None or self._closing:
            raise EngineFailure(self.failure or f"engine {self._stepper.engine} is closed")

    # From here on: the step thread only.

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                self._serve()
            reason = f"engine {self._stepper.engine} is closed"
        except Exception as error:  # noqa: BLE001 - a thread's outermost frame: whatever ends it must reach who waits
            reason = f"engine {self._stepper.engine} died: {type(error).__name__}: {error}"
        self._fail_all(reason)

    def _serve(self) -> None:
        while True:
            self._wake.clear()
            self._take_arrivals()
            self._run_commands()
            if self._closing:
                return
            worked = not self.suspended and self._work()
            self._answers.send()
            if not worked:
                self._wake.wait()

    def _work(self) -> bool:
        """Admit and run one step; False when there is nothing to do."""
        stepper = self._stepper
        if self._waiting:
            # In order of arrival; one whose slot is busy does not hold up those behind it.
            self._waiting = deque([ticket for ticket in self._waiting if not stepper.admit(ticket)])
        if not stepper.tickets:
            assert not self._waiting, "an idle engine has a slot for every waiting request"
            return False
        for ticket, generation in stepper.step():
            ticket.answer(generation)
        return True

    def _take_arrivals(self) -> None:
        while self._arrivals:
            ticket = self._arrivals.popleft()
            request = ticket.request
            if len(request.token_ids) >= self._stepper.table.context_length:
                ticket.answer(self._stepper.unstarted(ticket, "context"))
            elif request.sampling.max_new_tokens == 0:
                ticket.answer(self._stepper.unstarted(ticket, "length"))
            else:
                self._waiting.append(ticket)

    def _run_commands(self) -> None:
        while self._commands:
            act, done = self._commands[0]
            try:
                result = act()
            except EngineFailure as error:
                result = error
            # Taken off only now: a command that ends the thread is failed with the rest.
            self._commands.popleft()
            if done is not None:
                self._answers.put(done, result)

    def _abort(self, request_id: str) -> None:
        for slot, ticket in self._stepper.tickets.items():
            if ticket.request.request_id == request_id:
                _, generation = self._stepper.finish(slot, "abort")
                ticket.answer(generation)
                return
        for ticket in self._waiting:
            if ticket.request.request_id == request_id:
                self._waiting.remove(ticket)
                ticket.answer(self._stepper.unstarted(ticket, "abort"))
                return

    def _release(self, trajectory_id: str) -> None:
        slot = self._stepper.table.slot_of.get(trajectory_id)
        if slot is not None:
            self._stepper.table.release(slot)

    def _set_suspended(self, suspended: bool) -> None:
        self.suspended = suspended

    def _switch(self, weights: FusedWeights) -> int:
        if not self.suspended:
            raise EngineFailure(
                f"engine {self._stepper.engine}: load of version {weights.version} while it serves; suspend it first"
            )
        return self._stepper.switch(weights)

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            # Nothing is accepted from now on, so what is unanswered is all here.
            self.failure = reason
        error = EngineFailure(reason)
        for ticket in [*self._stepper.tickets.values(), *self._waiting, *self._arrivals]:
            ticket.answer(error)
        for _, done in self._commands:
            if done is not None:
                self._answers.put(done, error)
        self._stepper.tickets.clear()
        self._waiting.clear()
        self._arrivals.clear()
        self._commands.clear()
        self._answers.send()
