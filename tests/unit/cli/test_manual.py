"""Manual pages and completion say what --help says."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from kvtierd.cli import main as cli
from kvtierd.cli.manual import MANUALS, completion, manual
from kvtierd.config.fields import FIELDS
from kvtierd.core.errors import ExitCode


def test_every_command_and_option_is_in_the_manual() -> None:
    page = manual("kvtierctl").replace("\\-", "-")
    for name in cli.COMMANDS:
        assert f'.SS "kvtierctl {name}' in page
        for action in cli.command_parser(name)._actions:
            assert all(option in page for option in action.option_strings)


def test_every_setting_and_exit_code_is_in_the_manual() -> None:
    page = manual("kvtierd.yaml").replace("\\-", "-")
    assert [key for key in FIELDS if f".B {key}:" not in page] == []
    codes = manual("kvtierd")
    assert [code for code in ExitCode if f".B {code:d}\n" not in codes] == []


@pytest.mark.parametrize("name", list(MANUALS))
def test_page_is_clean_roff(name: str) -> None:
    text = manual(name)
    macros = {line.split()[0] for line in text.splitlines() if line.startswith(".")}
    assert macros <= {".TH", ".SH", ".SS", ".TP", ".B", ".PP"}
    if shutil.which("groff"):
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww"], input=text, capture_output=True, text=True, check=True
        )
        assert done.stderr == ""


def test_completion_offers_commands_and_their_options() -> None:
    script = completion() + (
        'complete_line() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kvtierctl; echo "${COMPREPLY[*]}"; }\n'
        "complete_line kvtierctl pin; complete_line kvtierctl ping --co; complete_line kvtierctl systemd un\n"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["ping pin", "--count", "uninstall"]
    assert done.stderr == ""
