"""Installs the services that the tests start themselves, where that can be done without asking anybody.

PostgreSQL and Chromium come from Debian's packages, when this is root on a machine with apt. Anywhere else
the tests that need them are skipped and say so. Standard library only.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys


def missing() -> list[str]:
    """Debian's packages of what the tests would not find."""
    postgresql = bool(glob.glob("/usr/lib/postgresql/*/bin/initdb")) or (
        shutil.which("initdb") is not None and shutil.which("postgres") is not None
    )
    chromium = shutil.which("chromium") is not None or shutil.which("chromium-browser") is not None
    found = {"postgresql": postgresql, "chromium": chromium}
    return [package for package, here in found.items() if not here]


def main() -> int:
    """The exit status: 0 also where nothing can be installed, unless continuous integration asks."""
    packages = missing()
    if not packages:
        return 0
    names = " and ".join(packages)
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        print(f"set-up: {names} not installed; the tests that need it will be skipped", flush=True)
        return 1 if os.environ.get("CI") else 0
    print(f"set-up: installing {names} for the tests", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        done = subprocess.run(
            [apt, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode:
            print("\n".join(done.stdout.decode("utf-8", "replace").splitlines()[-15:]), file=sys.stderr)
            print(f"set-up failed: apt-get could not install {names}", file=sys.stderr)
            return 1 if os.environ.get("CI") else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
