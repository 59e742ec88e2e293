from pathlib import Path

import pytest

from shoal.cli.cluster_secret import kept_secret, new_secret
from shoal.errors import InvalidConfig
from shoal.rpc.cluster import is_open_to_others, read_secret


def test_a_kept_secret_is_made_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first = kept_secret("shoal/a b")
    secret = read_secret(str(first))
    assert kept_secret("shoal/a b") == first and read_secret(str(first)) == secret
    other = kept_secret("shoal")
    assert other != first and read_secret(str(other)) != secret
    assert first.stat().st_mode & 0o777 == 0o600 and first.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(first.parent.iterdir()) == sorted((first, other))
    with pytest.raises(FileExistsError):
        new_secret(first)
    assert read_secret(str(first)) == secret and len(list(first.parent.iterdir())) == 2
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(InvalidConfig, match="give --cluster-secret-file"):
        kept_secret("shoal")


@pytest.mark.parametrize(
    ("mode", "owner", "reader", "is_open"),
    [
        (0o100600, 1000, 1000, False),
        (0o100640, 1000, 1000, True),
        (0o100440, 0, 1000, False),  # mounted for a group
        (0o100444, 0, 1000, True),
        (0o100460, 0, 1000, True),  # its group may write
        (0o100440, 0, 0, True),
    ],
)
def test_a_file_of_root_may_be_its_readers_by_the_group(mode: int, owner: int, reader: int, is_open: bool) -> None:
    assert is_open_to_others(mode, owner, reader) is is_open
