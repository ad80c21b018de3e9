"""A real PostgreSQL server for tests: Debian's binaries, a data folder of its own, a socket, no network.

PostgreSQL refuses to run as root, so root starts it as the user `postgres` of the package.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest


def binaries() -> Path | None:
    """The folder of `initdb` and `postgres`, None where PostgreSQL is not installed."""
    found = shutil.which("postgres")
    if found is not None and (Path(found).parent / "initdb").exists():
        return Path(found).parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return folders[-1].parent if folders else None


def require() -> Path:
    """The binaries; where continuous integration lacks them the test fails, elsewhere it is skipped."""
    folder = binaries()
    if folder is not None:
        return folder
    if os.environ.get("CI"):
        pytest.fail("PostgreSQL is not installed; tools/setup_services.py installs it")
    pytest.skip("PostgreSQL is not installed (on Debian: apt-get install postgresql)")


@contextmanager
def running() -> Iterator[str]:
    """A server; yields the URL of an empty database on it."""
    folder = require()
    user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    with tempfile.TemporaryDirectory(prefix="lp-pg-") as name:
        home = Path(name)
        home.chmod(0o755)
        data = home / "data"
        data.mkdir(mode=0o700)
        options = {"user": user} if os.geteuid() == 0 else {}
        if options:
            shutil.chown(data, user)
            shutil.chown(home, user)
        common = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": "/", **options}
        subprocess.run(
            [
                folder / "initdb",
                "-D",
                data,
                "-U",
                "loraplex",
                "-A",
                "trust",
                "--no-sync",
                "--locale=C",
                "-E",
                "UTF8",
            ],
            check=True,
            **common,
        )
        server = subprocess.Popen(
            [
                folder / "postgres",
                "-D",
                data,
                "-k",
                home,
                "-c",
                "listen_addresses=",
                "-c",
                "fsync=off",
                "-c",
                "max_connections=40",
                "-c",
                "shared_buffers=16MB",
            ],
            **common,
        )
        url = f"postgresql://loraplex@/postgres?host={home}"
        try:
            _until_up(server, home)
            yield url
        finally:
            server.terminate()
            server.communicate()


def _until_up(server: subprocess.Popen[bytes], home: Path) -> None:
    """Its first line that says so; then connections are taken."""
    assert server.stdout is not None
    said = []
    for line in server.stdout:
        said.append(line)
        if b"ready to accept connections" in line:
            return
    pytest.fail(f"PostgreSQL ended: {b''.join(said).decode()}")


@contextmanager
def database(server_url: str, name: str) -> Iterator[str]:
    """A fresh database on a running server; yields its URL."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    yield server_url.replace("/postgres?", f"/{name}?")
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
