"""The watermark never oscillates, whatever fills and frees the tier."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtierd.policy.watermarks import to_free

MARKS = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted)


@given(used=st.integers(0, 10_000), capacity=st.integers(0, 10_000), marks=MARKS, active=st.booleans())
def test_what_is_freed_leaves_the_tier_at_the_low_mark_and_at_rest(used, capacity, marks, active):
    low, high = marks
    count, still = to_free(used, capacity, high, low, active)
    assert 0 <= count <= used
    assert still == (count > 0)
    assert to_free(used - count, capacity, high, low, still) == (0, False) or count == 0
    if count == 0:
        assert to_free(used, capacity, high, low, still) == (0, False)


@given(
    capacity=st.integers(1, 500), marks=MARKS, steps=st.lists(st.integers(-3, 20), max_size=200), most=st.integers(1, 8)
)
def test_between_a_stop_and_the_next_start_the_gap_must_fill(capacity, marks, steps, most):
    low, high = marks
    used, active, stopped_at = 0, False, None
    for step in steps:
        used = min(capacity, max(0, used + step))
        was, (count, active) = active, to_free(used, capacity, high, low, active)
        if active and not was and stopped_at is not None:
            assert used - stopped_at >= int(high * capacity) - int(low * capacity)
        used -= min(count, most)
        if was and not active:
            stopped_at = used
            assert used <= int(low * capacity)
