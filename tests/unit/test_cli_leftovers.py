"""What killed servers leave is deleted by the next one, and nothing else; a service is found while its process lives."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.leftovers import sweep_leftovers
from shoal.cli.main import cli
from shoal.cli.services import Service
from shoal.cli.watchdog import Watchdog
from shoal.config.tls import ClusterConfig
from shoal.controller.owner import Owner, mark
from shoal.errors import NotFound


def dead() -> Owner:
    """Of a process that has ended."""
    code = "from shoal.controller.owner import Owner; print(Owner.me())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    owner = Owner.read(told.stdout)
    assert owner is not None
    return owner


def test_an_owner_is_gone_when_its_process_is_or_its_pid_is_another_one_s() -> None:
    me = Owner.me()
    assert Owner.read(str(me)) == me and not me.is_gone
    assert dead().is_gone
    assert Owner(me.pid, "1", me.host).is_gone  # the pid was used again
    assert not Owner(dead().pid, "1", "elsewhere/pid:[1]").is_gone
    assert [Owner.read(text) for text in ("", "a b c", "1 2")] == [None] * 3


def test_only_marked_folders_of_the_dead_are_swept_and_logs_only_when_old(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in (
        "shoal-secret-dead", "shoal-secret-mine", "shoal-secret-unmarked", "shoal-ray-young", "shoal-ray-old", "other-dead",
    )}  # fmt: skip
    for folder in folders.values():
        folder.mkdir()
        (folder / "owner").write_text(str(dead()))
    mark(folders["shoal-secret-mine"] / "owner")
    (folders["shoal-secret-unmarked"] / "owner").unlink()
    (tmp_path / "shoal-secret-link").symlink_to(folders["other-dead"])
    os.utime(folders["shoal-ray-old"], (1, 1))
    assert set(sweep_leftovers(tmp_path)) == {folders["shoal-secret-dead"], folders["shoal-ray-old"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "other-dead", "shoal-ray-young", "shoal-secret-link", "shoal-secret-mine", "shoal-secret-unmarked",
    ]  # fmt: skip


def test_a_service_is_found_by_any_of_its_addresses_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(NotFound, match=r"listens at 127\.0\.0\.1:1 \(none runs\)"):
        Service.at("127.0.0.1:1")
    service = Service(("127.0.0.1:1", "127.0.0.1:2"), "127.0.0.1:3", ClusterConfig("secret"))
    published = service.publish()
    assert Service.at("127.0.0.1:2") == service
    with pytest.raises(NotFound, match=r"those that run listen at 127\.0\.0\.1:1, 127\.0\.0\.1:2"):
        Service.at("127.0.0.1:4")
    assert published.path.stat().st_mode & 0o777 == 0o600
    published.path.write_text(published.path.read_text().replace(str(Owner.me()), str(dead())))
    assert not list(Service.running()) and not published.path.exists()
    published.withdraw()


async def test_a_watchdog_waits_for_the_first_word_and_blames_silence_after_it() -> None:
    watchdog = Watchdog(0.08)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(watchdog.silence(), 0.2)
    watchdog.heard()
    await asyncio.wait_for(watchdog.silence(), 1)


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for argument in ("version", "--version"):
        with pytest.raises(SystemExit) as ended:
            cli([argument], prog_name="shoal")
        assert ended.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("shoal ")
