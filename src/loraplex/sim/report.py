"""A simulation's report for people: the seed first, what struck and how requests ended, the replay command
last.
"""

from __future__ import annotations

from loraplex.sim.simulation import SimReport


def report_lines(report: SimReport, command: str) -> list[str]:
    """Lines to print. command: what runs the same timeline again."""
    setup = {name: value for name, value in report.setup.items() if name != "faults"}
    lines = [
        f"seed {report.seed}",
        "setup: " + ", ".join(f"{name} {value}" for name, value in setup.items()),
        f"ticks: {report.safety_ticks} with faults, {report.liveness_ticks} until everything had finished",
        "faults that struck:",
        *_counts(report.faults),
        "requests ended:",
        *_counts(report.outcomes),
        f"timeline {report.timeline}",
    ]
    if report.violation is not None:
        wrong = report.violation
        lines.append(f"VIOLATION of {wrong.checker} at tick {wrong.tick}: {wrong.message}")
    return [*lines, f"replay: {command}"]


def _counts(counts: dict[str, int]) -> list[str]:
    return [f"  {name:<22}{count:>8}" for name, count in counts.items()] or ["  none"]
