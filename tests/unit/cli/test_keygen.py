from __future__ import annotations

from pathlib import Path

import pytest

from kvtierd.cli.main import main
from kvtierd.protocol.curve import KeyPair


def test_key_is_written_for_its_owner_and_its_public_half_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "k"
    assert main(["keygen", str(file)]) == 0
    made = capsys.readouterr().out.strip()
    assert KeyPair.load(file).public == made
    assert main(["keygen", str(file)]) == 64, "never overwritten"
    assert "already" in capsys.readouterr().err
    assert main(["keygen", "--show", str(file)]) == 0
    assert capsys.readouterr().out.strip() == made
    assert main(["keygen", str(tmp_path / "no" / "k")]) == 74
