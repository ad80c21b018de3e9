"""Wishes in English to shell commands."""

from __future__ import annotations

from random import Random
from typing import Final

from demo.cases import Draft, Recipe, Task

_FOLDERS: Final = (
    "/var/log",
    "/tmp",
    "/srv/data",
    "/home/ada",
    "/etc",
    "/opt/app",
    "/usr/share",
    "~/projects",
    "~/photos",
    "/mnt/backup",
)
_ENDINGS: Final = ("py", "log", "txt", "csv", "jpg", "md", "json", "html", "yaml", "cpp")
_FILES: Final = (
    "notes",
    "report",
    "access",
    "users",
    "config",
    "results",
    "draft",
    "errors",
    "orders",
    "index",
)
_WORDS: Final = (
    "TODO",
    "timeout",
    "error",
    "password",
    "import",
    "failed",
    "version",
    "localhost",
    "retry",
    "warning",
)


def _forms(rng: Random) -> tuple[tuple[str, str], ...]:
    folder, ending, number = rng.choice(_FOLDERS), rng.choice(_ENDINGS), rng.randrange(2, 60)
    file, (word, other) = f"{rng.choice(_FILES)}.{ending}", rng.sample(_WORDS, 2)
    name = rng.choice(_FILES)
    return (
        (
            f"find .{ending} files under {folder} larger than {number} MB",
            f"find {folder} -type f -name '*.{ending}' -size +{number}M",
        ),
        (f"files in {folder} changed in the last {number} days", f"find {folder} -type f -mtime -{number}"),
        (
            f"delete .{ending} files in {folder} older than {number} days",
            f"find {folder} -type f -name '*.{ending}' -mtime +{number} -delete",
        ),
        (
            f"search for {word} in all .{ending} files in {folder}",
            f"grep -rn --include='*.{ending}' '{word}' {folder}",
        ),
        (f"count the lines with {word} in {file}", f"grep -c '{word}' {file}"),
        (f"show the last {number} lines of {file}", f"tail -n {number} {file}"),
        (f"show the first {number} lines of {file}", f"head -n {number} {file}"),
        (f"replace {word} by {other} in {file}", f"sed -i 's/{word}/{other}/g' {file}"),
        (f"pack {folder} into {name}.tar.gz", f"tar -czf {name}.tar.gz {folder}"),
        (f"unpack {name}.tar.gz into {folder}", f"tar -xzf {name}.tar.gz -C {folder}"),
        (f"the {number} largest entries in {folder}", f"du -sh {folder}/* | sort -rh | head -n {number}"),
        (f"how many .{ending} files are in {folder}", f"find {folder} -type f -name '*.{ending}' | wc -l"),
        (f"copy {folder} to {name} keeping permissions", f"cp -a {folder} {name}"),
    )


def draw(rng: Random) -> Draft:
    """One of thirteen kinds of command."""
    prompt, command = rng.choice(_forms(rng))
    return Draft(command, prompt, command)


TASK = Task(
    name="shell",
    title="Wishes in English to shell commands",
    data="Thirteen kinds of command with drawn values; held-out commands never occur in training.",
    instruction="Write one shell command for the wish. Answer with the command only.",
    checker="exact",
    max_tokens=48,
    recipe=Recipe(rank=16, alpha=8, targets=("v_proj", "o_proj", "down_proj"), steps=140, batch=8),
    draw=draw,
)
