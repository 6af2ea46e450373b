"""The operators' commands against a daemon that runs, with clients that use it."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtierd import Client, Geometry, Namespace, block_keys
from kvtierd.cli import main as cli
from kvtierd.daemon.embedded import EmbeddedDaemon
from kvtierd.daemon.http import HttpServer
from kvtierd.testing.waiting import wait_for

SHAPE = Geometry(block_size=16, layers=2, kv_heads=2, k_dim=64, v_dim=64)
COMMAND = [sys.executable, "-m", "kvtierd.cli.main"]


@pytest.fixture(scope="module")
def port() -> int:
    """A port that was free a moment ago."""

    async def find() -> int:
        server = HttpServer({})
        await server.listen_tcp("127.0.0.1:0")
        found = server.port
        await server.close()
        return found

    return asyncio.run(find())


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[EmbeddedDaemon]:
    overrides = {"host__capacity": "32MiB", "host__chunk_bytes": "8MiB", "nvme__capacity": "128MiB"}
    overrides |= {"nvme__segment_bytes": "16MiB", "metrics__listen": f"127.0.0.1:{port}", "metrics__slow_ms": 0}
    with EmbeddedDaemon(tmp_path_factory.mktemp("d"), **overrides) as running:
        yield running


@pytest.fixture
def client(daemon: EmbeddedDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint, timeout_s=10, transfer_timeout_s=20, name="engine-7") as connected:
        yield connected


@pytest.fixture
def kvtierctl(daemon: EmbeddedDaemon) -> Callable[..., str]:
    def run(*words: str) -> str:
        command = [*COMMAND, *words, "--endpoint", daemon.endpoint]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


@pytest.fixture
def page(port: int) -> Callable[[str], tuple[int, str]]:
    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return get


def _store(client: Client, model: str, count: int = 8) -> tuple:
    handle = client.register(Namespace(model=model, geometry=SHAPE))
    keys = block_keys(handle.digest, range(count * SHAPE.block_size), SHAPE.block_size)
    blocks = np.random.default_rng(1).integers(0, 256, (count, SHAPE.block_bytes), np.uint8)
    assert client.store(handle, keys, blocks).stored == count
    return handle, keys


def _samples(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_metrics_tell_what_clients_did(client: Client, page) -> None:
    before = _samples(page("/metrics")[1])
    handle, keys = _store(client, "metrics", 8)
    client.flush()
    assert client.lookup(handle, keys).count == 8
    now = _samples(page("/metrics")[1])

    def grown(name: str) -> float:
        return now[name] - before.get(name, 0)

    assert grown("kvtierd_lookup_tokens_total") == 8 * 16
    assert grown('kvtierd_hit_tokens_total{tier="host"}') == 8 * 16
    assert grown('kvtierd_block_states{tier="host",state="clean"}') == 8
    assert grown('kvtierd_request_seconds_count{operation="lookup"}') == 1
    assert grown('kvtierd_transferred_bytes_total{source="client",destination="host"}') == 8 * SHAPE.block_bytes
    assert now['kvtierd_tier_capacity_bytes{tier="host"}'] == 32 << 20


def test_health_and_what_is_not_for_everybody(page) -> None:
    assert page("/healthz") == (200, "ok\n")
    assert page("/readyz") == (200, "ok\n")
    assert page("/namespaces")[0] == page("/slowlog")[0] == page("/watch")[0] == 404


def test_operators_socket_is_for_the_daemons_user(daemon: EmbeddedDaemon) -> None:
    folder = daemon.runtime_dir / "admin"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "kvtierd.sock").stat().st_mode & 0o777 == 0o600


def test_info_shows_sections(kvtierctl, daemon: EmbeddedDaemon) -> None:
    text = kvtierctl("info")
    assert text.startswith(f"# serving on {daemon.endpoint}")
    assert [line for line in text.splitlines()[1:] if line.startswith("# ")] == [
        "# host", "# gpu", "# nvme", "# server", "# daemon", "# clients",
    ]  # fmt: skip
    one = json.loads(kvtierctl("info", "daemon", "--format", "json"))["sections"]
    assert list(one) == ["daemon"]
    assert one["daemon"]["daemon_pid"] == daemon.pid


def test_section_that_is_not_there_is_a_mistake_of_the_user(daemon: EmbeddedDaemon) -> None:
    command = [*COMMAND, "info", "weather", "--endpoint", daemon.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (64, "")
    assert "there is no section 'weather'; there are host, gpu" in done.stderr


def test_namespaces_show_models_with_their_blocks(client: Client, kvtierctl) -> None:
    _store(client, "large-model", 12)
    found = {entry["model"]: entry for entry in json.loads(kvtierctl("namespaces", "--format", "json"))}
    assert (found["large-model"]["blocks"], found["large-model"]["tenant"]) == (12, "default")
    assert "large-model" in kvtierctl("namespaces")


def test_slowlog_says_who_took_long(client: Client, kvtierctl) -> None:
    handle, keys = _store(client, "slow")
    client.lookup(handle, keys)
    entries = json.loads(kvtierctl("slowlog", "--format", "json", "-n", "1000"))["entries"]
    lookup = [entry for entry in entries if entry["what"] == "lookup"][-1]
    assert (lookup["client"], lookup["namespace"], lookup["blocks"]) == ("engine-7", "slow", 8)
    assert lookup["outcome"] == "hit 8"
    assert "engine-7" in kvtierctl("slowlog", "-n", "5")


def test_watch_streams_requests_and_blocks_until_it_has_enough(client: Client, daemon: EmbeddedDaemon) -> None:
    command = [
        *COMMAND,
        "watch",
        "--format",
        "json",
        "--only",
        "stored,delete",
        "-n",
        "2",
        "--endpoint",
        daemon.endpoint,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        number = 0

        def seen() -> bool:
            nonlocal number
            number += 1
            handle, keys = _store(client, f"watched-{number}")
            client.delete(handle, keys)
            return process.poll() is not None

        wait_for(seen, timeout_s=60)
        entries = [json.loads(line) for line in process.stdout]
        assert process.wait(30) == 0
    assert {entry["what"] for entry in entries} <= {"stored", "delete"}
    assert len(entries) == 2
    assert all(entry["blocks"] == 8 for entry in entries)


def test_watch_ends_with_130_when_it_is_interrupted(daemon: EmbeddedDaemon, client: Client) -> None:
    command = [*COMMAND, "watch", "--endpoint", daemon.endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        wait_for(lambda: client.ping() and _store(client, f"x-{client.ping()}") and _ready(process), timeout_s=60)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(30) == 130


def _ready(process: subprocess.Popen[str]) -> bool:
    return bool(select.select([process.stdout], [], [], 0)[0])


def test_top_shows_rates(kvtierctl) -> None:
    picture = json.loads(kvtierctl("top", "-n", "1", "-d", "0.1", "--format", "json"))
    assert picture["status"].startswith("serving")
    assert picture["per_second"]["requests"] >= 0
    assert "requests/s" in kvtierctl("top", "-n", "1", "-d", "0.1")


def test_flush_and_drain_and_back(client: Client, kvtierctl, page) -> None:
    _store(client, "drained")
    assert "stable storage" in kvtierctl("flush")
    assert kvtierctl("drain").startswith("draining, 0 B to write")
    try:
        assert page("/readyz") == (503, "draining\n")
        assert page("/healthz")[0] == 200
        handle = client.register(Namespace(model="drained", geometry=SHAPE))
        keys = block_keys(handle.digest, range(8 * 16), 16)
        assert client.lookup(handle, keys).count == 8  # reads go on
        more = block_keys(handle.digest, range(1000, 1000 + 16), 16)
        assert client.store(handle, more, np.zeros((1, SHAPE.block_bytes), np.uint8)).stored == 0
    finally:
        assert kvtierctl("drain", "--undo").startswith("serving")
    assert page("/readyz") == (200, "ok\n")
    _store(client, "after")


def test_blocks_are_shown_pinned_evicted_and_purged(client: Client, kvtierctl) -> None:
    handle, keys = _store(client, "chosen")[:2]
    kvtierctl("flush")
    shown = json.loads(kvtierctl("blocks", "--namespace", "chosen", "--format", "json"))
    assert (shown["total"], {block["model"] for block in shown["blocks"]}) == (8, {"chosen"})
    assert "host+nvme" in kvtierctl("blocks", "--namespace", "chosen", "-n", "3")
    assert kvtierctl("blocks", "--namespace", "chosen", "-n", "3").splitlines()[-1] == "5 more"
    assert kvtierctl("pin", "--namespace", "chosen", "--key", shown["blocks"][0]["key"]) == "1 blocks pinned\n"
    assert kvtierctl("evict", "--tier", "host", "--namespace", "chosen").startswith("7 copies evicted; 1 stay")
    assert kvtierctl("pin", "--undo") == "1 blocks unpinned\n"
    assert client.lookup(handle, keys).count == 8
    assert kvtierctl("purge", "--namespace", "chosen", "--older-than", "1h") == "0 blocks purged\n"
    assert kvtierctl("purge", "--namespace", "chosen") == "8 blocks purged\n"
    assert client.lookup(handle, keys).count == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["purge"], "name what to purge"),
        (["purge", "--all", "--tenant", "x"], "name what to purge"),
        (["blocks", "--key", "xyz"], "key is 'xyz'"),
    ],
)
def test_choice_that_is_none_is_a_mistake_of_the_user(
    words: list[str], said: str, daemon: EmbeddedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--endpoint", daemon.endpoint]) == 64
    assert said in capsys.readouterr().err


def test_usr1_writes_the_state_into_the_log(daemon: EmbeddedDaemon) -> None:
    os.kill(daemon.pid, signal.SIGUSR1)
    wait_for(lambda: "state: clients" in daemon.logs(), timeout_s=30)
    assert "host_capacity_bytes=33554432" in daemon.logs()


def test_quiet_command_says_nothing(kvtierctl) -> None:
    assert kvtierctl("ping", "-q") == kvtierctl("info", "-q") == kvtierctl("namespaces", "-q") == ""


@pytest.mark.usefixtures("daemon")
def test_port_in_use_costs_the_metrics_and_not_the_cache(port: int, tmp_path: Path) -> None:
    overrides = {"host__capacity": "8MiB", "host__chunk_bytes": "4MiB", "gpu__capacity": 0, "nvme__directory": ""}
    with EmbeddedDaemon(tmp_path, metrics__listen=f"127.0.0.1:{port}", **overrides) as second:
        with Client(second.endpoint, timeout_s=10) as client:
            _store(client, "second")
        said = f"metrics.listen: 127.0.0.1:{port} cannot be used: Address already in use; there are no metrics on it"
        assert said in second.logs()
        assert second.stop() == 0
