"""In float32, where no rounding decides between tokens, an engine with the connector answers as one without: cold, from
blocks that were stored before, after restarts, and whatever happens to the daemon meanwhile."""

from __future__ import annotations

import os
import signal
import statistics
import time

import pytest

from kvtierd import Client

BACK_S = 10
"""A client finds a daemon that is back within 2 s; this machine may be busy with an engine meanwhile."""


@pytest.fixture(scope="module")
def engine(start, daemon, text):
    with start("float32", dtype="float32", endpoint=daemon.endpoint) as running:
        running.answer(text[-40:], 2)
        yield running


@pytest.fixture(scope="module")
def cold(engine, daemon, short, long):
    """The first answers, by which everything is stored."""
    answers = {"short": engine.answer(short), "long": engine.answer(long)}
    daemon.await_blocks(11 + 27)
    return answers


def test_case_27_a_prompt_seen_once_is_found_and_a_cold_one_answered_as_without(
    cold, engine, plain_float32, short, long, whole, same, figures
):
    for name, prompt in (("short", short), ("long", long)):
        assert cold[name].cached == 0
        same(cold[name], plain_float32[name])
        again = engine.answer(prompt)
        assert again.cached == whole(prompt)
        same(again, plain_float32[name])
        without, first, hit = plain_float32[name].at_s[0], cold[name].at_s[0], again.at_s[0]
        tokens = f"float32, {len(prompt)} tokens: time to first token"
        figures[f"{tokens}, without the connector"] = f"{without:.3f}"
        figures[f"{tokens}, cold"] = f"{first:.3f}   {first / without:.3f} of without"
        figures[f"{tokens}, hit"] = f"{hit:.3f}   {hit / first:.3f} of cold"


@pytest.mark.usefixtures("cold")
def test_several_requests_at_once(engine, plain_float32, short, long, text, whole, same):
    answers = engine.generate([short, long, text[2000:2300], short])
    assert [answer.cached for answer in answers] == [whole(short), whole(long), 0, whole(short)]
    for answer, name in zip(answers, ("short", "long", "piece", "short"), strict=True):
        same(answer, plain_float32[name])


@pytest.mark.usefixtures("cold")
def test_a_longer_prompt_takes_what_is_there_of_it(engine, short, text, whole):
    """What follows the stored prefix is computed, and stored behind it."""
    longer = text[:1900]
    assert engine.answer(longer, 2).cached == whole(short)
    assert engine.answer(longer, 2).cached == whole(longer)


@pytest.mark.usefixtures("cold")
def test_what_was_generated_is_found_in_the_next_turn(engine, daemon, text):
    turn = text[2500:2700]
    before = daemon.blocks()
    answer = engine.answer(turn, 80)
    daemon.await_blocks(before + 2)
    assert engine.answer(turn + answer.tokens, 2).cached == 256


@pytest.mark.usefixtures("cold")
def test_requests_aborted_in_their_midst_leave_nothing_behind(engine, plain_float32, short, long, same):
    answers = engine.generate([long, short], 64, abort_after=3)
    assert len(answers[0].tokens) < 64
    same(engine.answer(short), plain_float32["short"])


@pytest.mark.usefixtures("cold")
def test_daemon_frozen_while_it_generates(engine, daemon, plain_float32, short, same, figures):
    """Frozen at the tenth token; requests that come while it is are computed."""
    usual = engine.answer(short)

    def freeze(tokens):
        if tokens == 10:
            os.kill(daemon.pid, signal.SIGSTOP)

    try:
        answer = engine.answer(short, on_token=freeze)
        frozen = engine.answer(short)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    same(answer, plain_float32["short"])
    same(frozen, plain_float32["short"])
    assert frozen.cached == 0
    steps = [b - a for a, b in zip(usual.at_s[1:], usual.at_s[2:], strict=False)]
    figures["a step, median and longest"] = f"{statistics.median(steps):.3f} {usual.longest_step_s:.3f}"
    figures["longest step with the daemon frozen at the tenth token"] = f"{answer.longest_step_s:.3f}"
    figures["time to first token with the daemon frozen, 5 s of patience"] = f"{frozen.at_s[0]:.3f}"
    deadline_s = time.monotonic() + 60
    while engine.answer(short, 2).cached == 0:
        assert time.monotonic() < deadline_s, "the engine did not find the daemon again"


@pytest.mark.usefixtures("cold")
def test_case_17_daemon_killed_while_it_generates_and_started_again(
    engine, daemon, plain_float32, short, long, whole, same, figures
):
    with Client(daemon.endpoint, timeout_s=20, transfer_timeout_s=60) as client:
        client.flush()

    def kill(tokens):
        if tokens == 10:
            daemon.kill()

    answer = engine.answer(short, on_token=kill)
    same(answer, plain_float32["short"])
    figures["longest step with the daemon killed at the tenth token"] = f"{answer.longest_step_s:.3f}"
    gone = engine.answer(short)
    assert gone.cached == 0
    same(gone, plain_float32["short"])
    assert "no daemon at" in engine.log()
    daemon.start()
    time.sleep(BACK_S)
    for name, prompt in (("short", short), ("long", long)):
        again = engine.answer(prompt)
        assert again.cached == whole(prompt)
        same(again, plain_float32[name])
    assert "is back" in engine.log()


@pytest.mark.usefixtures("cold")
def test_after_a_restart_of_the_daemon_all_whole_blocks_are_found(
    engine, daemon, plain_float32, short, long, whole, same
):
    daemon.restart()
    time.sleep(BACK_S)
    for name, prompt in (("short", short), ("long", long)):
        again = engine.answer(prompt)
        assert again.cached == whole(prompt)
        same(again, plain_float32[name])


@pytest.mark.usefixtures("cold")
def test_case_08_after_a_restart_of_the_engine_with_another_hash_seed_all_whole_blocks_are_found(
    start, daemon, plain_float32, short, long, whole, same
):
    other = {"PYTHONHASHSEED": "4711", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    with start("restarted", dtype="float32", endpoint=daemon.endpoint, environment=other) as engine:
        for name, prompt in (("short", short), ("long", long)):
            first = engine.answer(prompt)
            assert first.cached == whole(prompt)
            same(first, plain_float32[name])
