"""How long a server takes until it is ready, and how much memory it and its children have held at most by
then.

Run as `python tools/measure_start.py [words of loraplex serve]`; without words it serves the demo with its
adapters. Prints one line of JSON. Needs Linux (`/proc`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PORT = 18_421
DEMO = ["--demo", "--adapter-dir", str(Path(__file__).resolve().parents[1] / "demo" / "adapters")]


def ready() -> bool:
    """Whether the server takes requests."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=5) as answer:
            return int(answer.status) == 200
    except (OSError, urllib.error.URLError):
        return False


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in family(int(child)))]


def peak_mib(pid: int) -> float:
    """What a process held at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def used_s(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def role(pid: int) -> str:
    """What a process of a server is."""
    command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    names = {"engine_process": "engine", "prepare_process": "preparation", "loader_process": "loader"}
    return next((role for word, role in names.items() if word in command), "server")


def main() -> int:
    """Start, wait, report, end."""
    words = sys.argv[1:] or DEMO
    command = [
        sys.executable,
        "-m",
        "loraplex.cli",
        "serve",
        *words,
        "--port",
        str(PORT),
        "--log-level",
        "error",
    ]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not ready():
            if process.poll() is not None:
                return process.returncode
            time.sleep(0.02)
        took = time.monotonic() - began
        pids = family(process.pid)
        figures = {role(pid): (round(peak_mib(pid)), round(used_s(pid), 1)) for pid in pids}
        sys.stdout.write(
            json.dumps(
                {
                    "ready_s": round(took, 2),
                    "peak_mib": {name: peak for name, (peak, _) in figures.items()},
                    "cpu_s": {name: used for name, (_, used) in figures.items()},
                }
            )
            + "\n"
        )
        process.terminate()
        return process.wait()


if __name__ == "__main__":
    sys.exit(main())
