"""The demo tasks by name. Each module holds one task: its data generator, its checker's kind and its recipe."""

from __future__ import annotations

from demo.cases import Task
from demo.tasks import (
    cron,
    iso_date,
    json_extract,
    judge,
    numbers,
    pirate,
    redact,
    sentiment,
    shell,
    sql,
    tools,
    triage,
)

TASKS: dict[str, Task] = {
    module.TASK.name: module.TASK
    for module in (
        cron,
        iso_date,
        json_extract,
        judge,
        numbers,
        pirate,
        redact,
        sentiment,
        shell,
        sql,
        tools,
        triage,
    )
}
