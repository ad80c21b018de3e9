"""What a source may be, and which of them a remote caller may name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loraplex.artifact.companions import COMPANION_FILES
from loraplex.catalog.sources import LocalSource, RemoteSource, parse_source, permitted
from loraplex.core.errors import ErrorCode, LoraplexError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MISSING, UNPINNED = ErrorCode.ADAPTER_SOURCE_MISSING, ErrorCode.ADAPTER_SOURCE_UNPINNED
FORBIDDEN, UNSUPPORTED = ErrorCode.ADAPTER_SOURCE_FORBIDDEN, ErrorCode.UNSUPPORTED_OPTION


def code_of(source: str, roots: list[str] | None = None) -> ErrorCode:
    with pytest.raises(LoraplexError) as caught:
        parse_source(source) if roots is None else permitted(source, roots)
    assert len(caught.value.message) < 400
    return caught.value.code


def test_sources_that_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_source("/a/b") == LocalSource(Path("/a/b"))
    assert parse_source("s3://b/a/") == RemoteSource("s3://b/a/", "s3", "s3://b/a")
    for scheme in ("gs", "az", "https", "http"):
        parsed = parse_source(f"{scheme}://host/path")
        assert isinstance(parsed, RemoteSource)
        assert parsed.scheme == scheme
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    hub = parse_source(f"hf://owner/name@{COMMIT}")
    assert isinstance(hub, RemoteSource)
    assert hub.url == f"https://huggingface.co/owner/name/resolve/{COMMIT}"
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror/")
    nested = parse_source(f"hf://owner/name@{COMMIT}/sub/folder/")
    assert isinstance(nested, RemoteSource)
    assert nested.url == f"http://mirror/owner/name/resolve/{COMMIT}/sub/folder"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("", MISSING),
        ("a\0b", MISSING),
        ("/" * 5000, MISSING),
        ("s3://", MISSING),
        ("s3:///a", MISSING),
        ("s3://b/../c", MISSING),
        ("s3://b/a?versionId=1", MISSING),
        ("https://user@host/a", MISSING),
        ("s3://b/a b", MISSING),
        ("https://host/a#b", MISSING),
        ("ftp://host/a", UNSUPPORTED),
        ("file:///etc", UNSUPPORTED),
        ("s3a://b/a", UNSUPPORTED),
        ("://x", UNSUPPORTED),
        ("memory://x", UNSUPPORTED),
        ("hf://owner/name", UNPINNED),
        ("hf://owner/name@main", UNPINNED),
        ("hf://owner/name@v1.0", UNPINNED),
        (f"hf://owner/name@{COMMIT[:7]}", UNPINNED),
        (f"hf://owner/name@{COMMIT.upper()}", UNPINNED),
        ("https://host/a/%2e%2e/b", MISSING),
        ("https://host/a/.%2E/b", MISSING),
        ("s3://b/a/%2e%2e/c", MISSING),
        ("https://host/a/..\\b", MISSING),
        ("https://host/a\\b", MISSING),
        ("https://host/a/%5c../b", MISSING),
        ("https://host/a/%252e%252e/b", MISSING),
        ("https://host/a/%2525252e./b", MISSING),
        ("https://host/a%2fb", MISSING),
        ("https://host/./a", MISSING),
        (f"hf://owner/..@{COMMIT}", MISSING),
        (f"hf://../name@{COMMIT}", MISSING),
        (f"hf://name@{COMMIT}", MISSING),
        (f"hf://owner/name@{COMMIT}/../x", MISSING),
        (f"hf://o/n/x@{COMMIT}", MISSING),
    ],
)
def test_sources_that_are_refused(source: str, code: ErrorCode) -> None:
    assert code_of(source) is code


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def test_local_paths_stay_inside_the_roots(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", adapter(tmp_path / "outside")
    inside = adapter(root / "a")
    (root / "link-in").symlink_to(inside)
    (root / "link-out").symlink_to(outside)
    roots = [str(root)]
    assert permitted(str(inside), roots) == str(inside)
    assert permitted(str(root / "link-in"), roots) == str(inside)
    assert permitted(str(root / "nothing"), roots) == str(
        root / "nothing"
    )  # the load says that it is not there
    for source in (
        str(outside),
        str(root / "link-out"),
        f"{inside}/../../outside",
        f"{root}/a/../a",
        "root/a",
        "a",
        "",
        ".",
        "/",
        "/etc",
        f"{root}-evil/a",
        f"{inside}\0",
        "/dev/zero",
        "/proc/self/root",
    ):
        assert code_of(source, roots) in (FORBIDDEN, MISSING), source
    assert code_of(str(inside), []) is FORBIDDEN
    assert code_of(str(inside), ["s3://bucket"]) is FORBIDDEN


def test_files_of_a_folder_stay_inside_too(tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    secret.write_text("{}")
    shared = tmp_path / "root" / "blobs"
    shared.mkdir(parents=True)
    (shared / "blob").write_text("{}")
    for name, make, allowed in (
        ("leaves", lambda p: p.symlink_to(secret), False),
        ("stays", lambda p: p.symlink_to(shared / "blob"), True),
        ("device", lambda p: p.symlink_to("/dev/zero"), False),
        ("pipe", os.mkfifo, False),
        ("dead", lambda p: p.symlink_to(root / "nowhere"), True),
    ):
        folder = adapter(root / name)
        (folder / "adapter_config.json").unlink()
        make(folder / "adapter_config.json")
        if allowed:
            assert permitted(str(folder), [str(root)]) == str(folder)
        else:
            assert code_of(str(folder), [str(root)]) is FORBIDDEN, name
    folder = adapter(root / "card")
    (folder / "README.md").symlink_to(secret)
    assert code_of(str(folder), [str(root)]) is FORBIDDEN
    folder = adapter(root / "other-files")
    (folder / "notes.md").symlink_to(secret)  # nothing reads it
    assert permitted(str(folder), [str(root)]) == str(folder)


def test_shards_that_an_index_may_name_stay_inside_too(tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    secret.write_bytes(b"")
    folder = adapter(root / "sharded")
    (folder / "part-1.safetensors").symlink_to(secret)
    assert code_of(str(folder), [str(root)]) is FORBIDDEN
    (folder / "part-1.safetensors").unlink()
    (folder / "part-1.safetensors").write_bytes(b"")
    assert permitted(str(folder), [str(root)]) == str(folder)


@pytest.mark.parametrize("name", COMPANION_FILES)
def test_files_of_text_stay_inside_too(tmp_path: Path, name: str) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    secret.write_bytes(b"{}")
    folder = adapter(root / "spoken")
    (folder / name).symlink_to(secret)
    assert code_of(str(folder), [str(root)]) is FORBIDDEN


def test_a_folder_of_very_many_files_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = adapter(tmp_path / "root" / "many")
    monkeypatch.setattr("loraplex.core.limits.MAX_ADAPTER_FOLDER_FILES", len(list(folder.iterdir())))
    assert permitted(str(folder), [str(tmp_path)]) == str(folder)
    (folder / "one-more").write_bytes(b"")
    assert code_of(str(folder), [str(tmp_path)]) is FORBIDDEN


def test_names_with_escapes_are_understood() -> None:
    for source in (
        "https://host/a%20b/c",
        "https://host/a%25b",
        "https://host/..a/b...",
        "s3://bucket/a%2e1",
    ):
        assert isinstance(parse_source(source), RemoteSource)


def test_remote_sources_need_a_prefix_where_one_is_given_or_where_it_is_the_web() -> None:
    hub = f"hf://owner/name@{COMMIT}"
    for source in ("s3://bucket/a", "gs://bucket/a", hub):
        assert permitted(source, ["/local"]) == source
    assert permitted("s3://bucket/team/a", ["s3://bucket/team/"]) == "s3://bucket/team/a"
    assert permitted("https://host/adapters/a", ["https://host/adapters"]) == "https://host/adapters/a"
    for source, roots in (
        ("http://169.254.169.254/latest", ["/local"]),
        ("https://host/a", ["https://other", "s3://host"]),
        ("s3://bucket/teams/a", ["s3://bucket/team"]),
        ("s3://other/team/a", ["s3://bucket/team"]),
        ("https://host.evil/adapters/a", ["https://host"]),
        ("http://host/adapters/a", ["https://host/adapters"]),
        (hub, ["hf://other"]),
    ):
        assert code_of(source, roots) is FORBIDDEN, source
