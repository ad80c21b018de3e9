"""The engine's step, as seven named calls. Read this first.

    drain    messages from clients become state
    admit    requests at the head of the queue get slot, pages and leases, or start a load; wants move on
    reserve  selected rows get pages; the pool's pressure is resolved here
    plan     the selection becomes a frozen, packed plan
    execute  the plan is validated against current state and launched
    commit   the oldest launched plan's result becomes state, once enough plans are in flight
    publish  messages and events leave

At depth 0 a plan is committed in the step that launched it, and so is one without rows. At depth 1 the next
one is planned and launched first, with references to tokens that are still on the device; what takes pages or
slots away waits for the commit.

Synchronous and deterministic: everything outside comes through ports.
"""

from __future__ import annotations

from loraplex.core.plan import StepResult
from loraplex.core.ports import Backend, Clock, EventSink, Grammars, Loader, Mailbox
from loraplex.engine import accounts, admission, commit, growth, intake, integrity, launch, overload, urgency
from loraplex.engine.constraints import NoGrammars
from loraplex.engine.residency import ahead, hosting, loads, registration, wants
from loraplex.engine.sizes import EngineLimits
from loraplex.engine.state import EngineState, Flight
from loraplex.schedule.select import Selection, select_rows


class Engine:
    """One worker's control plane: requests and adapters in, plans out, tokens back."""

    def __init__(
        self,
        limits: EngineLimits,
        backend: Backend,
        mailbox: Mailbox,
        clock: Clock,
        events: EventSink,
        *,
        grammars: Grammars | None = None,
        loader: Loader | None = None,
    ) -> None:
        """grammars: None refuses requests whose output must follow one. loader: None where every image is on
        the host.
        """
        self.state = EngineState(
            limits, clock, grammars or NoGrammars(), hosting.AllOnHost() if loader is None else loader
        )
        self._backend = backend
        self._mailbox = mailbox
        self._events = events
        self._still = False

    def step(self, wait: bool = False) -> bool:
        """One iteration. wait: block for a message when there is nothing else to do. Whether anything moved.

        Where something is open and the step before moved none of it, it waits for a grammar that is being
        compiled or for the pause after a failed load: then this step begins with a pause of its own, whether
        it was told to wait or not.
        """
        if self._still and self.state.only_pausing:
            self._mailbox.pause()
        moved = self._drain(wait and not self.state.busy)
        self._admit()
        selection = self._reserve()
        flight = self._plan(selection)
        launched = self._execute(flight)
        committed = self._commit(launched and flight is not None and flight.plan.rows > 0)
        seen = bool(self.state.events)
        published = self._publish()
        moved = moved or launched or committed or published
        self._still = not (moved or seen)
        return moved

    def _drain(self, wait: bool) -> bool:
        messages = self._mailbox.receive(wait)
        for message in messages:
            intake.handle(self.state, message)
        overload.offer(self.state, messages)
        fetched = hosting.poll(self.state)
        return bool(messages) or fetched

    def _admit(self) -> None:
        state = self.state
        urgency.enforce(state)
        wants.enforce(state)
        wants.serve(state)
        fetched = hosting.poll(state)  # what `serve` asked for may be there already
        if fetched:
            wants.serve(state)
        overload.abort(state)
        admission.admit(state)
        ahead.load_ahead(state)
        loads.pump(state)

    def _reserve(self) -> Selection:
        selection = select_rows(self.state.table, self.state.limits.token_budget, self.state.limits.mixed)
        return growth.grow(self.state, selection)

    def _plan(self, selection: Selection) -> Flight | None:
        return launch.make_flight(self.state, selection)

    def _execute(self, flight: Flight | None) -> bool:
        return flight is not None and launch.launch(self.state, self._backend, flight)

    def _commit(self, busy: bool) -> bool:
        """Commit until at most `depth` plans are in flight; all where no plan was launched that keeps the
        device busy.

        A plan without rows has its result as soon as it was launched: what waits for it need not wait for
        another step.
        """
        allowed = self.state.limits.depth if busy else 0
        committed = False
        while len(self.state.flights) > allowed:
            committed = True
            if not self._commit_oldest():
                break
        registration.finish_departures(self.state)
        accounts.report(self.state)
        return committed

    def _commit_oldest(self) -> bool:
        """Commit one plan; when it failed, roll back every plan in flight and return False."""
        result = StepResult.unpack(self._backend.collect())
        flight = self.state.flights.popleft()
        if not result.error.size:
            commit.apply_result(self.state, flight, result)
            return True
        failed = [(flight, result.error_message)]
        while self.state.flights:
            later = StepResult.unpack(self._backend.collect())
            flight = self.state.flights.popleft()
            if later.error.size:
                failed.append((flight, later.error_message))
            else:
                commit.apply_result(self.state, flight, later)
        commit.undo(self.state, failed)
        return False

    def _publish(self) -> bool:
        state = self.state
        outbox, state.outbox = state.outbox, []
        events, state.events = state.events, []
        overload.follow(state, events)
        for event in events:
            self._events.emit(event)
        if outbox:
            self._mailbox.send(outbox)
        return bool(outbox)

    @property
    def idle(self) -> bool:
        """Whether no request, load or plan is under way."""
        return not self.state.busy

    def check(self) -> None:
        """Integrity of all books, complete when idle. Raises the broken invariant."""
        integrity.check(self.state)
