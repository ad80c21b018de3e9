"""Folders of `--adapter-dir`: which are served under which name, what is said of the others, and those that
come later.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.server.rig import Front, run

from loraplex.config import ServeConfig
from loraplex.core.errors import CapacityError, ErrorCode
from loraplex.server.administration import register
from loraplex.server.administration.register import CommandLine, adapter_sources, late_source
from loraplex.server.announce import Announcer


def folder(path: Path, content: str = "") -> Path:
    """What looks like an adapter, to a listing and to the rig."""
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "weights").write_text(content or str(path))
    return path


class Said(Announcer):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def started(front: Front, said: Said) -> CommandLine:
    return CommandLine(front.service, said)


def test_a_taken_name_is_said_and_a_directory_may_be_an_adapter_itself(tmp_path: Path) -> None:
    first = folder(tmp_path / "run1" / "checkpoint-500")
    folder(tmp_path / "run2" / "checkpoint-500")
    itself = folder(tmp_path / "mine")
    dirs = tuple(str(tmp_path / name) for name in ("run1", "run2", "mine"))
    sources, notes = adapter_sources(ServeConfig(model="m", adapter_dirs=dirs))
    assert [(named.alias, named.source) for named in sources] == [
        ("checkpoint-500", str(first)),
        ("mine", str(itself)),
    ]
    assert len(notes) == 1
    assert str(tmp_path / "run2") in notes[0]
    assert str(first) in notes[0]
    sources, notes = adapter_sources(ServeConfig(model="m", adapter_dirs=(dirs[0], dirs[0])))
    assert (len(sources), notes) == (1, [])


def test_a_link_is_served_under_its_own_name_at_start_as_late(tmp_path: Path) -> None:
    real = folder(tmp_path / "run" / "checkpoint-500")
    (tmp_path / "run" / "latest").symlink_to(real)
    config = ServeConfig(model="m", adapter_dirs=(str(tmp_path / "run"),), adapters=(("best", str(real)),))
    sources, notes = adapter_sources(config)
    assert [named.alias for named in sources] == ["best", "checkpoint-500", "latest"]
    assert {named.source for named in sources} == {str(real)}
    assert notes == []
    for name in ("checkpoint-500", "latest"):
        late = late_source(config, name)
        assert late is not None
        assert late.source == str(real)


def test_what_looks_like_an_adapter_and_is_none_is_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder(run / "good")
    (run / "plain").mkdir()
    (run / "notes.txt").write_text("")
    (run / "half").mkdir()
    (run / "half" / "adapter_model.safetensors").write_bytes(b"")
    (run / "pipe").mkdir()
    os.mkfifo(run / "pipe" / "adapter_config.json")
    (run / "dangling").mkdir()
    (run / "dangling" / "adapter_config.json").symlink_to(tmp_path / "nowhere")
    folder(run / "outer" / "checkpoint-1")
    (run / "loop").symlink_to(run / "loop")
    sources, notes = adapter_sources(ServeConfig(model="m", adapter_dirs=(str(run),)))
    assert [named.alias for named in sources] == ["good"]
    said = {note.partition(" is not served: ")[0]: note for note in notes}
    assert {Path(path).name for path in said} == {"half", "pipe", "dangling", "outer"}
    assert f"give --adapter-dir {run / 'outer'}" in said[str(run / "outer")]


def test_whatever_is_wrong_with_a_folder_the_rest_is_served(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        for name in ("a", "b", "c", "not a name", "two\nlines", os.fsdecode(b"\xff\xfe")):
            folder(front.roots / name, ascii(name))
        (front.roots / "b" / "weights").unlink()
        prepare, said = front.adapters._life._prepare, Said()

        async def failing(source: str) -> object:
            if source.endswith("c"):
                raise ValueError("a bug of a reader")
            return await prepare(source)

        front.adapters._life._prepare = failing  # type: ignore[assignment]
        await started(front, said).register()
        assert [revision.alias for revision in front.adapters] == ["a"]
        assert {line.partition(" is not served")[0] for line in said.lines if "not served" in line} == {
            "adapter b",
            "adapter c",
            "adapter not a name",
            "adapter two\nlines",
            "adapter \udcff\udcfe",
        }

    run(tmp_path, test)


def test_an_engine_that_is_gone_is_not_a_folders_fault(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        folder(front.roots / "a")
        front.engine.refuse = CapacityError(ErrorCode.ENGINE_DIED, "gone")
        with pytest.raises(CapacityError):
            await started(front, Said()).register()

    run(tmp_path, test)


@pytest.mark.parametrize("late", [True, False])
def test_a_folder_that_comes_later_is_served_when_it_is_asked_for(tmp_path: Path, late: bool) -> None:
    async def test(front: Front) -> None:
        command_line = started(front, Said())
        await command_line.register()
        command_line.begin()
        for name in ("../adapters/new", "new/", "new"):
            assert (await front.complete(model=name)).status_code == 404
        broken = folder(front.roots / "new")
        (broken / "weights").unlink()
        for _ in range(2):
            assert (await front.complete(model="new")).status_code == 404
        (broken / "weights").write_text("whole")  # a copy under way brings the configuration first
        expected = 200 if late else 404
        assert (await front.complete(model="new")).status_code == expected
        assert (await front.complete(model="new@1")).status_code == expected
        if late:
            await front.http.delete("/v1/adapters/new")
            assert (await front.complete(model="new")).status_code == 404  # what was removed stays so
        await command_line.close()

    run(tmp_path, test, adapter_dir_late=late)


def test_a_start_waits_for_the_first_folders_and_serves_any_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(register, "MAX_FOLDERS_BEFORE_READY", 2)

    async def test(front: Front) -> None:
        for number in range(6):
            folder(front.roots / f"a{number}")
        command_line = started(front, Said())
        await command_line.register()
        assert [revision.alias for revision in front.adapters] == ["a0", "a1"]
        command_line.begin()
        assert (await front.complete(model="a5")).status_code == 200
        assert command_line._behind is not None
        await command_line._behind
        assert sorted(revision.alias for revision in front.adapters) == [f"a{n}" for n in range(6)]
        await command_line.close()

    run(tmp_path, test)
