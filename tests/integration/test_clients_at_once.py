"""Several client processes at once, killed and frozen at every step, against a real daemon."""

from __future__ import annotations

import signal
import time

import pytest

from kvtierd.testing.waiting import wait_for


def test_case_01_many_processes_read_and_write_at_once_and_every_byte_is_right(spawn, client):
    workers = [spawn("mixed", seed, 60) for seed in range(4)]
    tallies = [worker.line() for worker in workers]
    assert sum(tally["wrong"] for tally in tallies) == 0
    assert sum(tally["stored"] for tally in tallies) > 30
    assert sum(tally["fetched"] for tally in tallies) > 50
    stats = client.stats()
    assert stats["host_evicted_blocks"] > 0
    assert stats["onboarded_blocks"] > 0, "nothing came back from disk: the test is too small"
    assert stats.get("host_corrupt_blocks", 0) == 0


def test_case_08_interpreters_with_different_hash_seeds_hit_each_others_blocks(spawn, client, script):
    writer = spawn("store", 3, PYTHONHASHSEED="1")
    writer.until("committed")
    reader = spawn("read", 3, PYTHONHASHSEED="2")
    assert reader.until("copied") == {"step": "copied", "good": 4, "right": True}
    assert client.lookup(client.register(script.SPACE), script.keys_of(3, 4)).count == 4


@pytest.mark.parametrize("step", ["registered", "reserved", "written", "committed"])
def test_case_02_case_15_a_writer_killed_at_any_step_leaves_nothing_but_whole_blocks(spawn, client, script, step):
    writer = spawn("store", 5)
    writer.until(step)
    writer.send(signal.SIGKILL)
    wait_for(lambda: client.stats()["reservations"] == 0 and client.stats()["leases"] == 0)
    space, keys = client.register(script.SPACE), script.keys_of(5, 4)
    found = client.fetch(space, keys)
    assert found.count == (4 if step == "committed" else 0)
    if found.count:
        assert (found.blocks == script.content_of(keys)).all()
    assert client.store(space, keys, script.content_of(keys)).dropped == 0
    assert client.lookup(space, keys).count == 4


@pytest.mark.parametrize("step", ["acquired", "copied", "released"])
def test_case_15_a_reader_killed_at_any_step_holds_nothing(spawn, client, script, step):
    space, keys = client.register(script.SPACE), script.keys_of(6, 4)
    client.store(space, keys, script.content_of(keys))
    reader = spawn("read", 6)
    reader.until(step)
    reader.send(signal.SIGKILL)
    wait_for(lambda: client.stats()["leases"] == 0)
    for prompt in range(20, 30):
        blocks = script.keys_of(prompt, 8)
        client.store(space, blocks, script.content_of(blocks))
        assert client.lookup(space, blocks).count == 8, "a dead reader still holds slots"


@pytest.mark.parametrize("step", ["reserved", "written"])
def test_case_05_a_frozen_writer_that_wakes_up_harms_nobody(spawn, client, script, step):
    writer = spawn("store", 7)
    writer.until(step)
    writer.send(signal.SIGSTOP)
    wait_for(lambda: client.stats()["quarantined_reservations"] == 1)
    space = client.register(script.SPACE)
    stored = {}
    for prompt in [7, *range(40, 50)]:
        keys = script.keys_of(prompt, 4)
        stored[prompt] = keys
        client.store(space, keys, script.content_of(keys))
    writer.send(signal.SIGCONT)
    writer.go_on()
    writer.until("committed")
    for keys in stored.values():
        found = client.fetch(space, keys)
        assert (found.blocks[: found.count] == script.content_of(keys)[: found.count]).all()
    assert client.stats()["quarantined_reservations"] == 0


def test_case_05_a_reader_frozen_beyond_its_lease_learns_that_its_bytes_are_not_to_be_used(spawn, client, script):
    space, keys = client.register(script.SPACE), script.keys_of(8, 4)
    client.store(space, keys, script.content_of(keys))
    reader = spawn("read", 8)
    assert reader.until("acquired")["count"] == 4
    reader.send(signal.SIGSTOP)
    wait_for(lambda: client.stats()["leases"] == 0)
    for prompt in range(60, 72):
        other = script.keys_of(prompt, 8)
        client.store(space, other, script.content_of(other))
    reader.send(signal.SIGCONT)
    reader.go_on()
    copied = reader.until("copied")
    assert copied["good"] == 0
    assert copied["right"]


def test_case_17_clients_go_on_by_themselves_after_the_daemon_was_killed(spawn, client, daemon, script):
    space, keys = client.register(script.SPACE), script.keys_of(9, 4)
    client.store(space, keys, script.content_of(keys))
    client.flush(timeout_s=30)
    watcher = spawn("watch", 9, 8)
    watcher.line()
    time.sleep(0.5)
    daemon.kill()
    time.sleep(0.5)
    daemon.start()
    ready_s = time.monotonic()
    report = watcher.line()
    assert report["wrong"] == 0
    assert report["worst_s"] < 1.5, "a call outlived its deadline by more than a second"
    assert [hit for hit, _ in report["flips"]] == [False, True]
    assert report["flips"][1][1] - ready_s < 2.5, "the client took too long to come back"


def test_a_clean_restart_under_load_loses_nothing_that_was_stored(client, daemon, script):
    space, stored = client.register(script.SPACE), []
    for prompt in range(80, 86):
        keys = script.keys_of(prompt, 4)
        client.store(space, keys, script.content_of(keys))
        stored.append(keys)
    daemon.restart()
    wait_for(lambda: client.lookup(space, stored[0]).count == 4)
    for keys in stored:
        found = client.fetch(space, keys)
        assert found.count == 4
        assert (found.blocks == script.content_of(keys)).all()
    assert daemon.stop() == 0


def test_messages_of_an_earlier_life_change_nothing(client, daemon, script):
    import msgspec
    import zmq

    from kvtierd.protocol import messages as m

    space, keys = client.register(script.SPACE), script.keys_of(11, 2)
    client.store(space, keys, script.content_of(keys))
    client.flush(timeout_s=30)
    decode = msgspec.msgpack.Decoder(m.AnyReply).decode
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, 5000
        socket.connect(daemon.endpoint)
        socket.send(msgspec.msgpack.encode(m.Hello(id=1)))
        old = decode(socket.recv_multipart()[0]).epoch
        daemon.restart()
        socket.send_multipart([msgspec.msgpack.encode(m.Purge(id=2, epoch=old))])
        reply = decode(socket.recv_multipart()[0])
        assert isinstance(reply, m.ErrorReply)
        assert reply.code in {"stale_epoch", "no_session"}
    wait_for(lambda: client.lookup(space, keys).count == 2)


def test_several_threads_may_share_a_client(client, script):
    import concurrent.futures

    space = client.register(script.SPACE)

    def work(prompt):
        keys = script.keys_of(prompt, 3)
        truth = script.content_of(keys)
        for _ in range(5):
            client.store(space, keys, truth)
            found = client.fetch(space, keys)
            if not (found.blocks[: found.count] == truth[: found.count]).all():
                return False
        return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(90, 98)))
