"""Moments of deadlines, and estimates from what was measured."""

from __future__ import annotations

import pytest

from loraplex.schedule.deadlines import Deadlines
from loraplex.schedule.estimates import Estimates


def test_moments_come_up_once_in_their_order() -> None:
    moments = Deadlines()
    for name, at in (("late", 30), ("soon", 10), ("gone", 5), ("moved", 40), ("never", 99)):
        moments.look_at(name, at)
    moments.look_at("moved", 20)
    moments.forget("gone")
    assert moments.due(9) == []
    assert moments.due(30) == ["soon", "moved", "late"]
    assert moments.due(98) == []
    assert len(moments) == 1


def test_a_moment_that_was_moved_later_does_not_come_up_early() -> None:
    moments = Deadlines()
    moments.look_at("r", 10)
    moments.look_at("r", 50)
    assert moments.due(49) == []
    assert moments.due(50) == ["r"]


def test_moments_of_forgotten_requests_do_not_pile_up() -> None:
    moments = Deadlines()
    for number in range(5000):
        moments.look_at(f"r{number}", 1_000_000 + number)
        moments.forget(f"r{number}")
        assert len(moments._heap) <= 70


def test_nothing_is_guessed() -> None:
    estimates = Estimates()
    assert estimates.prefill_ns(10_000, 20) == 0
    assert estimates.load_ns(1 << 30) == 0


def test_a_step_costs_its_start_and_its_rows() -> None:
    estimates = Estimates()
    for rows in (16, 500, 64, 1000, 128, 256) * 4:
        estimates.note_step(rows, 5_000_000 + 20_000 * rows)
    assert estimates.prefill_ns(1000, 1) == pytest.approx(25_000_000, rel=1e-6)
    assert estimates.prefill_ns(4096, 8) == pytest.approx(8 * 5_000_000 + 4096 * 20_000, rel=1e-6)


def test_steps_of_one_size_count_as_steps_alone() -> None:
    estimates = Estimates()
    for _ in range(5):
        estimates.note_step(10, 4_000_000)
    assert estimates.prefill_ns(1000, 2) == 8_000_000


def test_rows_that_seem_to_make_steps_faster_cost_nothing() -> None:
    estimates = Estimates()
    estimates.note_step(10, 9_000_000)
    estimates.note_step(1000, 1_000_000)
    assert estimates.prefill_ns(500, 1) == estimates.prefill_ns(5, 1) > 0


def test_the_newest_measurements_count_most() -> None:
    estimates = Estimates()
    for _ in range(200):
        estimates.note_load(1000, 1000)
    for _ in range(200):
        estimates.note_load(1000, 3000)
    assert estimates.load_ns(1_000_000) == pytest.approx(3_000_000, rel=0.01)
