"""Peers in the same run: driven as they are, with stand-ins for their programs that do as little as they can."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from kvtierd.bench import peer_environments, peer_vllm, peers
from kvtierd.bench.options import Options
from kvtierd.bench.peer_lmcache import REQUESTS, lmcache_server, load_rate, median
from kvtierd.bench.peer_mooncake import mooncake
from kvtierd.bench.rows import BenchError
from kvtierd.testing.vllm_engine import Answer

LMCACHE = """#!{python}
import http.server, json, sys
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
if words[0] == "server":
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)
        def log_message(self, *_):
            pass
    http.server.HTTPServer(("127.0.0.1", int(value("--http-port"))), Page).serve_forever()
if words[1] == "server":
    count = int(value("--end")) - int(value("--start"))
    metrics = {{
        "results": {{"checksum_ok": count - 1, "checksum_fail": {wrong}}},
        "cold_lookup": {{"cold_lookup_p50": 50.0}},
        "warm_lookup": {{"warm_lookup_p50": 40.0}},
        "cold_store": {{"cold_store_p50": 100.0}},
        "warm_retrieve": {{"warm_retrieve_p50": 80.0}},
    }}
else:
    metrics = {{
        "config": {{"data_per_round_mb": 256.0}},
        "op_0": {{"operation": "Store", "duration_p50_ms": 1.0}},
        "op_2": {{"operation": "Load", "duration_p50_ms": 64.0, "total_success": 512 - {wrong}, "total_keys": 512}},
    }}
open(value("--output"), "w").write(json.dumps({{"metrics": metrics}}))
"""

MOONCAKE = """
import ctypes


class MooncakeDistributedStore:
    def __init__(self):
        self.kept = {}

    def setup(self, *words):
        print("a line of its log")
        return 0

    def register_buffer(self, place, size):
        return 0

    def batch_put_from(self, keys, places, sizes):
        self.kept.update({key: ctypes.string_at(p, n) for key, p, n in zip(keys, places, sizes)})
        return [0] * len(keys)

    def batch_get_into(self, keys, places, sizes):
        for key, place in zip(keys, places):
            data = bytes([DAMAGE ^ self.kept[key][0]]) + self.kept[key][1:]
            ctypes.memmove(place, data, len(data))
        return list(sizes)

    def batch_is_exist(self, keys):
        return [int(key in self.kept) for key in keys]
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def lmcache(folder: Path, wrong: int = 0) -> Path:
    program(folder / "bin" / "lmcache", LMCACHE.format(python=sys.executable, wrong=wrong))
    return folder / "bin" / "python"


def test_without_any_peer_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BenchError, match="make bench-peers"):
        list(peers.rows(Options(quick=True)))


def test_a_peer_is_found_where_its_program_is(tmp_path: Path) -> None:
    assert peer_environments.interpreter("lmcache", tmp_path) is None
    lmcache(tmp_path / ".venv-engines-lmcache")
    assert peer_environments.interpreter("lmcache", tmp_path) == tmp_path / ".venv-engines-lmcache/bin/python"
    assert len(set(peer_environments.free_ports(5))) == 5


def test_lmcaches_server_is_asked_for_fresh_requests_and_its_medians_are_taken(tmp_path: Path) -> None:
    with lmcache_server(lmcache(tmp_path), tmp_path, memory_gib=1) as server:
        rounds = [server.round(), server.round()]
        assert rounds[0] == {"lookup": 0.04, "store": 0.1, "retrieve": 0.08}
        assert (server.asked, server.retrieved) == (2 * REQUESTS, 2 * REQUESTS - 2)
    assert median(rounds, "store") == 0.1


def test_wrong_bytes_of_a_peer_are_no_figure(tmp_path: Path) -> None:
    python = lmcache(tmp_path, wrong=1)
    with lmcache_server(python, tmp_path, memory_gib=1) as server, pytest.raises(BenchError, match="other bytes"):
        server.round()
    with pytest.raises(BenchError, match="loaded 511 of 512"):
        load_rate(python, tmp_path, "fs", 64, 2 << 20)


def test_lmcaches_adapters_are_rated_by_the_median_round(tmp_path: Path) -> None:
    assert load_rate(lmcache(tmp_path), tmp_path, "fs", 64, 2 << 20) == pytest.approx((256 << 20) / 0.064)


def test_a_program_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    program(tmp_path / "bin" / "lmcache", f"#!{sys.executable}\nraise SystemExit('no such model')\n")
    with pytest.raises(BenchError, match="no such model"):
        load_rate(tmp_path / "bin" / "python", tmp_path, "fs", 64, 2 << 20)
    with (
        pytest.raises(BenchError, match="ended with 1: no such model"),
        lmcache_server(tmp_path / "bin" / "python", tmp_path, memory_gib=1),
    ):
        pass


@pytest.fixture
def store(tmp_path: Path):
    """An interpreter with a module that stands in for Mooncake's."""

    def make(damage: int = 0) -> Path:
        program(tmp_path / "lib" / "mooncake" / "store.py", f"DAMAGE = {damage}\n{MOONCAKE}")
        program(tmp_path / "bin" / "mooncake_master", f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
        starts = f'#!/bin/sh\nPYTHONPATH="{tmp_path / "lib"}" exec {sys.executable} "$@"\n'
        return program(tmp_path / "bin" / "python", starts)

    return make


def test_mooncake_answers_round_by_round(store) -> None:
    with mooncake(store(), 3, 4096) as peer:
        assert all(peer.seconds(work) > 0 for work in ("store", "load", "lookup", "store", "load"))


def test_mooncake_that_brings_other_bytes_back_is_no_figure(store) -> None:
    with mooncake(store(damage=1), 3, 4096) as peer:
        peer.seconds("store")
        with pytest.raises(BenchError, match=r"other bytes came back in objects \[0, 1, 2\]"):
            peer.seconds("load")


class Engine:
    """Stands in for vLLM: a prompt takes two seconds, and half of one where the connector knows it."""

    finds = True
    rights = True

    def __init__(self, *_: object, **__: object) -> None:
        self.known: set[tuple[int, ...]] = set()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def answer(self, prompt: list[int], new_tokens: int) -> Answer:
        name = tuple(prompt)
        hit = name in self.known and self.finds
        self.known.add(name)
        tokens = [1] * new_tokens if self.rights or not hit else [2] * new_tokens
        return Answer(tokens, [0.0] * new_tokens, [0.5 if hit else 2.0], 1408 if hit else 0)


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(peer_vllm.MODEL, str(tmp_path))
    monkeypatch.setattr(peer_vllm, "Engine", Engine)
    monkeypatch.setattr(peer_vllm, "SAVED_S", 0.0)


@pytest.mark.usefixtures("_stand_in")
def test_a_prompt_is_timed_cold_and_when_it_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = peer_vllm.example_connector(tmp_path)
    assert peer_vllm.first_token_s(tmp_path, tmp_path / "log", connector, 3) == (2.0, 0.5)
    monkeypatch.setattr(Engine, "rights", False)
    with pytest.raises(BenchError, match=r"ExampleConnector: \[2, 2, 2, 2\] instead of \[1, 1, 1, 1\]"):
        peer_vllm.first_token_s(tmp_path, tmp_path / "log", connector, 1)
    monkeypatch.setattr(Engine, "finds", False)
    with pytest.raises(BenchError, match="was not found"):
        peer_vllm.first_token_s(tmp_path, tmp_path / "log", peer_vllm.our_connector("ipc:///x"), 1)


def test_without_a_model_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(peer_vllm.MODEL, raising=False)
    with pytest.raises(BenchError, match="make engines-env"):
        peer_vllm.model()
