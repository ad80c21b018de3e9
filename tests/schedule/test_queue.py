"""The waiting queue: order, parking, and forgotten requests, which must not pile up."""

from __future__ import annotations

from loraplex.schedule.queue import Ticket, WaitingQueue


def tickets(count: int, priority: int = 0) -> list[Ticket]:
    return [Ticket(priority, number, f"r{priority}.{number}") for number in range(count)]


def drained(queue: WaitingQueue) -> list[str]:
    out = queue.heads(len(queue))
    for request_id in out:
        queue.discard(request_id)
    return out


def test_urgent_ones_first_then_arrival_and_a_place_is_kept() -> None:
    queue = WaitingQueue()
    late, urgent = tickets(3), tickets(2, priority=-1)
    for ticket in (late[2], late[0], urgent[1], late[1], urgent[0]):
        queue.push(ticket)
    queue.take(urgent[0])
    assert queue.heads(1) == ["r-1.1"]
    queue.push(urgent[0])
    assert queue.heads(2) == ["r-1.0", "r-1.1"]
    assert drained(queue) == ["r-1.0", "r-1.1", "r0.0", "r0.1", "r0.2"]


def test_parked_ones_come_back_in_their_old_places() -> None:
    queue = WaitingQueue()
    four = tickets(4)
    for ticket in four:
        queue.push(ticket)
    for ticket, key in zip(four, ("a", "b"), strict=False):
        queue.park(ticket, key)
    assert queue.discard("r0.1")
    assert not queue.discard("r0.1")
    assert len(queue) == 3
    queue.unpark("a")
    queue.unpark("b")
    assert drained(queue) == ["r0.0", "r0.2", "r0.3"]


def test_what_is_forgotten_while_the_head_does_not_move_does_not_pile_up() -> None:
    """Clients that give up and ask again while nothing can be admitted."""
    queue = WaitingQueue()
    head, cold = Ticket(0, 0, "head"), Ticket(0, 1, "cold")
    queue.push(head)
    queue.push(cold)
    queue.park(cold, "a")
    for number in range(2, 5000):
        ticket = Ticket(0, number, f"r{number}", tenant=("default", "other")[number % 3 == 0])
        queue.push(ticket)
        if number % 2:
            queue.park(ticket, "a")
        queue.discard(f"r{number}")
        level = queue._levels[1]
        kept = len(level.fronts) + len(level.lanes) + sum(map(len, queue._parked.values()))
        assert kept <= 200
    queue.unpark("a")
    assert drained(queue) == ["head", "cold"]
