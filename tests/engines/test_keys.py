"""The key file: made once, private, refused where others can read it."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from discolab import DiscoError
from discolab.__main__ import main
from discolab.engines.keys import Keys, default_file, load_keys


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for keys where there are none."""
    monkeypatch.setenv("DISCOLAB_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_made_on_first_use_and_private(home: Path) -> None:
    keys = load_keys()
    assert default_file() == home / "keys.json"
    assert stat.S_IMODE(default_file().stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert os.listdir(home) == ["keys.json"]
    assert load_keys() == keys


def test_made_privately_whatever_the_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        load_keys()
    finally:
        os.umask(before)
    assert stat.S_IMODE(default_file().stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_several_that_make_it_at_once_have_the_same(home: Path) -> None:
    barrier, found = threading.Barrier(8), []

    def load() -> None:
        barrier.wait()
        found.append(load_keys())

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len(set(found)) == 1
    assert os.listdir(home) == ["keys.json"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o666])
def test_others_must_not_read_it(home: Path, mode: int) -> None:
    load_keys()
    default_file().chmod(mode)
    with pytest.raises(DiscoError, match=r"chmod 600 .*keys\.json"):
        load_keys()


def test_a_node_does_not_make_keys(home: Path) -> None:
    with pytest.raises(DiscoError, match="copy it from the machine of the session"):
        load_keys(make=False)
    assert not home.exists()


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", "\0\1", json.dumps(dict.fromkeys(Keys.fresh().as_dict(), "x" * 40))],
)
def test_a_damaged_file_is_told(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(DiscoError, match="is no key file of discolab"):
        load_keys(file)


def test_keys_that_do_not_belong_together() -> None:
    mixed = {**Keys.fresh().as_dict(), "session_public": Keys.fresh().session_public}
    with pytest.raises(ValueError, match="damaged"):
        Keys.of(mixed)


def test_a_folder_is_no_key_file(tmp_path: Path) -> None:
    with pytest.raises(DiscoError, match="no regular file"):
        load_keys(tmp_path)


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiscoError, match=r"the key file .* can't be"):
        load_keys(tmp_path / "file" / "keys.json")


def test_secrets_are_not_shown() -> None:
    keys = Keys.fresh()
    assert keys.session_secret not in repr(keys)
    assert keys.node_secret not in repr(keys)


def test_the_command_says_which_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys"]) == 0
    assert capsys.readouterr().out.strip() == str(home / "keys.json")
    assert load_keys(make=False)
