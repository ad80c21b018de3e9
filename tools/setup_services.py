"""Installs the services that the tests start themselves, where that can be done without asking anybody.

PostgreSQL comes from Debian's packages, when this is root on a machine with apt. Anywhere else the tests that
need it are skipped and say so. Standard library only.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys


def installed() -> bool:
    """Whether the tests will find PostgreSQL's binaries."""
    return bool(glob.glob("/usr/lib/postgresql/*/bin/initdb")) or (
        shutil.which("initdb") is not None and shutil.which("postgres") is not None
    )


def main() -> int:
    """The exit status: 0 also where nothing can be installed, unless continuous integration asks."""
    if installed():
        return 0
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        print("set-up: PostgreSQL is not installed; the tests that need it will be skipped", flush=True)
        return 1 if os.environ.get("CI") else 0
    print("set-up: installing PostgreSQL for the catalog's tests", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "postgresql"]):
        done = subprocess.run(
            [apt, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode:
            print("\n".join(done.stdout.decode("utf-8", "replace").splitlines()[-15:]), file=sys.stderr)
            print("set-up failed: apt-get could not install PostgreSQL", file=sys.stderr)
            return 1 if os.environ.get("CI") else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
