"""Keys of remote clients: files, environment, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq.auth

from kvtierd.protocol.curve import CurveKeys, KeyPair, keys_for

PAIR, SERVER = KeyPair.new(), KeyPair.new()


def test_saved_pair_is_loaded_and_is_one_of_zeromqs_certificates(tmp_path: Path) -> None:
    path = tmp_path / "client.key"
    PAIR.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert KeyPair.load(path) == PAIR
    assert zmq.auth.load_certificate(path) == (PAIR.public.encode(), PAIR.secret.encode())


def test_key_is_never_overwritten(tmp_path: Path) -> None:
    PAIR.save(tmp_path / "k")
    with pytest.raises(FileExistsError):
        SERVER.save(tmp_path / "k")
    assert KeyPair.load(tmp_path / "k") == PAIR


def test_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    PAIR.save(tmp_path / "k")
    (tmp_path / "k").chmod(0o640)
    with pytest.raises(ValueError, match="chmod 0600"):
        KeyPair.load(tmp_path / "k")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no secret key"),
        ('secret-key = "short"', "has 5 characters"),
        (f'public-key = "{SERVER.public}"\nsecret-key = "{PAIR.secret}"', "not of one pair"),
        (f'public-key = "{SERVER.public}"', "no secret key"),
    ],
)
def test_file_that_is_none_says_why(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "k"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=says) as caught:
        KeyPair.load(path)
    assert PAIR.secret not in str(caught.value)


def test_secret_is_in_no_text_that_is_made_of_a_pair() -> None:
    assert PAIR.secret not in repr(PAIR) + repr(CurveKeys(SERVER.public, PAIR))


def test_environment_names_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PAIR.save(tmp_path / "k")
    monkeypatch.setenv("KVTIERD_SERVER_KEY", SERVER.public)
    monkeypatch.setenv("KVTIERD_KEY_FILE", str(tmp_path / "k"))
    assert keys_for("tcp://host:1", None) == CurveKeys(SERVER.public, PAIR)
    assert keys_for("ipc:///run/x", None) is None
    monkeypatch.delenv("KVTIERD_SERVER_KEY")
    with pytest.raises(ValueError, match=r"KVTIERD_SERVER_KEY and .*one of them is not set"):
        keys_for("tcp://host:1", None)
    monkeypatch.delenv("KVTIERD_KEY_FILE")
    with pytest.raises(ValueError, match="wants CURVE keys"):
        keys_for("tcp://host:1", None)
