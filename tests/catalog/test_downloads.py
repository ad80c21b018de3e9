"""Downloads from real servers: resumed, bound to one version, verified, bounded, content-addressed,
reclaimed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.artifact.corpus_weights import write_shards
from tests.artifact.tiny import edit_config, write_lora
from tests.catalog.remotes import BUCKET, WebServer, bucket, s3_environment, s3_server, upload

from loraplex.catalog import artifacts as module
from loraplex.catalog.artifacts import ArtifactStore
from loraplex.catalog.sources import RemoteSource, parse_source
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PLENTY = 1 << 30


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer() as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store", PLENTY)


def remote(source: str) -> RemoteSource:
    parsed = parse_source(source)
    assert isinstance(parsed, RemoteSource)
    return parsed


def fetched(store: ArtifactStore, source: str, content: str | None = None) -> tuple[dict[str, bytes], str]:
    with store.reading(remote(source), content) as (folder, key):
        return {path.name: path.read_bytes() for path in folder.iterdir()}, key


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(code: ErrorCode, store: ArtifactStore, source: str, content: str | None = None) -> LoraplexError:
    with pytest.raises(LoraplexError) as caught:
        fetched(store, source, content)
    assert caught.value.code is code, str(caught.value)
    return caught.value


def make_bucket(url: str) -> None:
    import urllib.request

    request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT", data=b"", headers={"host": url[7:]})
    urllib.request.urlopen(request).close()


def test_s3_single_sharded_swapped_and_missing(
    tmp_path: Path, store: ArtifactStore, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_environment(monkeypatch, s3)
    make_bucket(s3)
    folder = write_lora(tmp_path / "a")
    (folder / "optimizer.pt").write_bytes(b"never fetched")
    source = upload(folder, "one/a")
    got, key = fetched(store, source)
    assert got == {name: data for name, data in files(folder).items() if name.startswith("adapter_")}
    assert fetched(store, source + "/") == (got, key)
    sharded = write_lora(tmp_path / "b")
    write_shards(sharded)
    assert fetched(store, upload(sharded, "two"))[0] == files(sharded)
    edit_config(folder, lambda c: c | {"lora_alpha": 9})
    upload(folder, "one/a")
    refused(ErrorCode.ADAPTER_SOURCE_CHANGED, ArtifactStore(tmp_path / "elsewhere", PLENTY), source, key)
    assert fetched(store, source, key) == (got, key)  # the store still has what the revision names
    new, other = fetched(store, source)
    assert other != key
    assert new["adapter_model.safetensors"] == got["adapter_model.safetensors"]
    assert (
        "adapter_config.json is not in"
        in refused(ErrorCode.ADAPTER_SOURCE_MISSING, store, f"s3://{BUCKET}/nothing").message
    )
    refused(ErrorCode.ADAPTER_SOURCE_MISSING, store, "s3://no-such-bucket/a")


def test_s3_without_weights_or_with_a_pickle(
    tmp_path: Path, store: ArtifactStore, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore

    s3_environment(monkeypatch, s3)
    make_bucket(s3)
    obstore.put(bucket(), "bare/adapter_config.json", b"{}")  # type: ignore[arg-type]
    refused(ErrorCode.ADAPTER_SOURCE_MISSING, store, f"s3://{BUCKET}/bare")
    obstore.put(bucket(), "bare/adapter_model.bin", b"x")  # type: ignore[arg-type]
    refused(ErrorCode.ADAPTER_FILE_PICKLE, store, f"s3://{BUCKET}/bare")
    obstore.put(bucket(), "big/adapter_config.json", b" " * (5 << 20))  # type: ignore[arg-type]
    obstore.put(bucket(), "big/adapter_model.safetensors", b"x")  # type: ignore[arg-type]
    refused(ErrorCode.ADAPTER_TOO_LARGE, store, f"s3://{BUCKET}/big")
    write_shards(folder := write_lora(tmp_path / "b"))
    next(folder.glob("*-00002-*")).unlink()
    refused(ErrorCode.ADAPTER_SOURCE_MISSING, store, upload(folder, "half"))


def test_a_broken_download_goes_on_where_it_stopped(
    tmp_path: Path, store: ArtifactStore, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr("loraplex.catalog.web.ATTEMPTS", 1)
    folder = write_lora(tmp_path / "a")
    web.publish(folder, "/a")
    web.down_after = 4
    refused(ErrorCode.ADAPTER_SOURCE_UNAVAILABLE, store, f"{web.url}/a")
    assert store.keys() == set()
    web.down_after = None
    got, key = fetched(store, f"{web.url}/a")
    assert got == files(folder)
    size = len(got["adapter_model.safetensors"])
    ranges = web.bytes_asked("adapter_model.safetensors")
    assert len(ranges) == -(-size // 1000) + 1  # the one that broke was asked for twice
    assert ranges.count("bytes=0-999") == 1
    web.asked.clear()
    assert fetched(store, f"{web.url}/a")[1] == key
    assert {method for method, _, _ in web.asked} == {"HEAD"}
    web.asked.clear()
    assert fetched(store, f"{web.url}/a", key)[1] == key
    assert web.asked == []


def test_bytes_of_two_versions_never_mix(
    tmp_path: Path, store: ArtifactStore, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr("loraplex.catalog.web.ATTEMPTS", 1)
    first, second = write_lora(tmp_path / "a"), write_lora(tmp_path / "b")
    edit_config(second, lambda c: c | {"lora_alpha": 9})
    (second / "adapter_model.safetensors").write_bytes(
        (first / "adapter_model.safetensors").read_bytes()[:-4] + b"\0\0\0\1"
    )
    for tags in (True, False):
        web.tags = tags
        web.publish(first, "/a")
        web.down_after = 4
        refused(ErrorCode.ADAPTER_SOURCE_UNAVAILABLE, store, f"{web.url}/a")
        web.down_after = None
        web.publish(second, "/a")
        assert fetched(store, f"{web.url}/a")[0] == files(second)
    web.tags = True
    web.publish(first, "/b")
    real = module.RemoteFolder.read

    def changing(self: Any, file: Any, start: int, end: int) -> bytes:
        if start == 2000:
            web.publish(second, "/b")
        return real(self, file, start, end)

    monkeypatch.setattr(module.RemoteFolder, "read", changing)
    refused(ErrorCode.ADAPTER_SOURCE_CHANGED, store, f"{web.url}/b")


def test_a_hub_is_read_at_its_commit_and_a_missing_network_is_said(
    tmp_path: Path, store: ArtifactStore, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_lora(tmp_path / "a")
    web.publish(folder, f"/owner/name/resolve/{COMMIT}/sub")
    monkeypatch.setenv("HF_ENDPOINT", web.url)
    assert fetched(store, f"hf://owner/name@{COMMIT}/sub")[0] == files(folder)
    refused(ErrorCode.ADAPTER_SOURCE_MISSING, store, f"hf://owner/name@{'f' * 40}/sub")
    monkeypatch.setattr("loraplex.catalog.web.ATTEMPTS", 1)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    error = refused(ErrorCode.ADAPTER_SOURCE_UNAVAILABLE, store, f"hf://owner/name@{COMMIT}")
    assert (error.status, "check the network" in error.message) == (503, True)


def test_what_is_damaged_on_disk_is_fetched_again(
    tmp_path: Path, store: ArtifactStore, web: WebServer
) -> None:
    folder = write_lora(tmp_path / "a")
    web.publish(folder, "/a")
    _, key = fetched(store, f"{web.url}/a")
    (store.root / "content" / key / "adapter_model.safetensors").write_bytes(b"damaged")
    for content in (key, None):
        assert fetched(store, f"{web.url}/a", content) == (files(folder), key)


def test_the_store_is_bounded_and_reclaims_what_nobody_names(tmp_path: Path, web: WebServer) -> None:
    for number in range(4):
        folder = write_lora(tmp_path / f"a{number}", lora_alpha=number + 1)
        web.publish(folder, f"/a{number}")
    size = sum(map(len, files(folder).values()))
    store = ArtifactStore(tmp_path / "store", 3 * size + size // 2)
    keys = [fetched(store, f"{web.url}/a{number}")[1] for number in range(3)]
    error = refused(ErrorCode.ARTIFACT_STORE_FULL, store, f"{web.url}/a3")
    assert error.status == 429
    assert "--store-gb" in error.message
    assert store.keys() == set(keys)
    # Unnamed ones go before superseded ones, current ones never, and no more than is needed.
    assert store.reclaim({keys[0]}, {keys[1]}, size) >= size
    assert store.keys() == {keys[0], keys[1]}
    keys.append(fetched(store, f"{web.url}/a3")[1])
    assert store.reclaim({keys[0], keys[3]}, {keys[1]}, size) >= size
    assert store.keys() == {keys[0], keys[3]}
    assert store.reclaim({keys[0], keys[3]}, set(), 4 * size) == 0
    with store.reading(remote(f"{web.url}/a0")) as (held, _):
        assert store.reclaim(set(), set(), 9 * size) > 0
        assert store.keys() == {keys[0]}
        assert held.is_dir()
    assert not list((store.root / "locks").iterdir())
    tiny = ArtifactStore(tmp_path / "tiny", size // 2)
    refused(ErrorCode.ARTIFACT_STORE_FULL, tiny, f"{web.url}/a0")


def test_many_download_one_source_at_once(tmp_path: Path, web: WebServer) -> None:
    folder = write_lora(tmp_path / "a")
    web.publish(folder, "/a")
    web.publish(folder, "/same-bytes")
    got: list[Any] = []

    def fetch(name: str) -> None:
        got.append(fetched(ArtifactStore(tmp_path / "store", PLENTY), f"{web.url}/{name}"))

    threads = [threading.Thread(target=fetch, args=(name,)) for name in ("a", "same-bytes") * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 6
    assert all(item == got[0] for item in got)
    assert not list((tmp_path / "store" / "locks").iterdir())


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CallerError) as caught:
        ArtifactStore(tmp_path / "file" / "store", PLENTY)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_a_full_store_is_cleared_for_the_server_before_it_refuses(tmp_path: Path, web: WebServer) -> None:
    from tests.artifact.tiny import write_base

    from loraplex.adapters.preparation import Preparation
    from loraplex.adapters.prepare_pool import PreparePool
    from loraplex.artifact.tensors import Dtype
    from loraplex.build.base_model import describe_base
    from loraplex.config import EngineConfig

    (tmp_path / "base").mkdir()
    base = describe_base(write_base(tmp_path / "base"), Dtype.FLOAT32, 4)
    for number in range(3):
        folder = write_lora(tmp_path / f"a{number}", lora_alpha=number + 1)
        web.publish(folder, f"/a{number}")
    size = sum(map(len, files(folder).values()))
    store = ArtifactStore(tmp_path / "store", size + size // 2)
    preparation = Preparation(
        tmp_path / "base", EngineConfig(model="m", images_dir=str(tmp_path / "i")), store
    )
    preparation._pool = PreparePool(base, tmp_path / "i", store.root, store.limit_bytes)
    names: list[tuple[set[str], set[str]]] = []

    async def named() -> tuple[set[str], set[str]]:
        return names[-1]

    async def test() -> None:
        first = await preparation(f"{web.url}/a0")
        assert first.content is not None
        names.append((set(), {first.content}))
        second = await preparation(f"{web.url}/a1")  # the superseded one goes when nothing else can
        assert second.content is not None
        assert store.keys() == {second.content}
        names.append(({second.content}, set()))
        with pytest.raises(LoraplexError) as caught:
            await preparation(f"{web.url}/a2")
        assert caught.value.code is ErrorCode.ARTIFACT_STORE_FULL

    async def closed() -> None:
        try:
            await test()
        finally:
            await preparation.close()

    preparation.named = named
    asyncio.run(closed())


def staged(store: ArtifactStore) -> int:
    return sum(path.stat().st_size for path in (store.root / "staging").rglob("*") if path.is_file())


def test_what_broke_off_counts_and_makes_way(
    tmp_path: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr("loraplex.catalog.web.ATTEMPTS", 1)
    for number in range(4):
        web.publish(write_lora(tmp_path / f"a{number}", lora_alpha=number + 1), f"/a{number}")
    size = sum(map(len, files(tmp_path / "a0").values()))
    store = ArtifactStore(tmp_path / "store", 2 * size)
    for number in range(3):
        web.down_after = 6  # most of its bytes
        refused(ErrorCode.ADAPTER_SOURCE_UNAVAILABLE, store, f"{web.url}/a{number}")
        assert 0 < staged(store) <= store.limit_bytes
    web.down_after = None
    _, first = fetched(store, f"{web.url}/a3")
    assert store.keys() == {first}
    assert staged(store) + store.total_bytes() <= store.limit_bytes
    fetched(store, f"{web.url}/a2")
    assert len(store.keys()) == 2
    assert staged(store) == 0
    refused(ErrorCode.ARTIFACT_STORE_FULL, store, f"{web.url}/a1")


def test_a_download_that_cannot_succeed_leaves_nothing(
    tmp_path: Path, store: ArtifactStore, web: WebServer
) -> None:
    web.publish(write_lora(tmp_path / "a"), "/a")
    web.headers["content-range"] = "bytes 0-1/2"  # never what was asked for
    refused(ErrorCode.ADAPTER_SOURCE_CHANGED, store, f"{web.url}/a")
    assert list((store.root / "staging").iterdir()) == []
    web.headers.clear()
    assert fetched(store, f"{web.url}/a")[0] == files(tmp_path / "a")


def test_files_that_say_how_text_is_made_come_along_and_belong_to_the_key(
    tmp_path: Path, store: ArtifactStore, web: WebServer
) -> None:
    folder = write_lora(tmp_path / "a")
    web.publish(folder, "/a")
    _, bare = fetched(store, f"{web.url}/a")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "trainer_state.json").write_text("{}")
    web.publish(folder, "/a")
    got, key = fetched(store, f"{web.url}/a")
    assert set(got) == {*files(folder)} - {"trainer_state.json"}
    assert got["chat_template.jinja"] == b"{{ messages }}"
    assert key != bare
    web.says["/a/chat_template.jinja"] = 403  # said of what is not there where keys may not be listed
    assert set(fetched(store, f"{web.url}/a")[0]) == {*files(folder)} - {
        "trainer_state.json",
        "chat_template.jinja",
    }
