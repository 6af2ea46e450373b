from __future__ import annotations

from kvtierd.policy.stepping_aside import GRACE, HORIZON_NS, PAUSE_MAX_NS, WRITE_SHARE, SteppingAside

MS = 1_000_000


def test_nobody_copies_at_first():
    aside = SteppingAside()
    assert not aside.copying(0)
    assert aside.pause_ns(5 * MS, 0) == 0


def test_a_client_counts_as_copying_for_a_multiple_of_its_copy():
    aside = SteppingAside()
    aside.given(2 * MS, 1000)
    assert aside.copying(1000 + GRACE * 2 * MS - 1)
    assert not aside.copying(1000 + GRACE * 2 * MS)


def test_what_several_are_given_adds_up():
    aside = SteppingAside()
    aside.given(MS, 0)
    aside.given(MS, 0)
    assert aside.copying(2 * GRACE * MS - 1)


def test_nobody_counts_as_copying_beyond_the_horizon():
    aside = SteppingAside()
    for _ in range(100):
        aside.given(1000 * MS, 7)
    assert aside.copying(7 + HORIZON_NS - 1)
    assert not aside.copying(7 + HORIZON_NS)


def test_writes_keep_their_share_beside_copies_that_never_end():
    aside, now_ns, written_ns = SteppingAside(), 0, 0
    while now_ns < 10_000 * MS:
        aside.given(50 * MS, now_ns)
        now_ns += 8 * MS
        written_ns += 8 * MS
        now_ns += aside.pause_ns(8 * MS, now_ns)
    assert abs(written_ns / now_ns - WRITE_SHARE) < 0.01


def test_a_pause_ends_with_the_copies():
    aside = SteppingAside()
    aside.given(MS, 0)
    assert aside.pause_ns(60 * MS, 3 * MS) == (GRACE - 3) * MS


def test_a_write_that_took_for_ever_is_not_followed_by_a_pause_for_ever():
    aside = SteppingAside()
    aside.given(1000 * MS, 0)
    assert aside.pause_ns(10**15, 0) <= PAUSE_MAX_NS
