"""Any bytes as a configuration give settings or a list of mistakes, never anything else."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvtierd.config.document import read_text
from kvtierd.config.fields import FIELDS
from kvtierd.config.loader import ConfigError, load

_KEYS = st.sampled_from([*FIELDS, "host", "nope", "kv_cache_config.compression", "", "host."])


@given(
    st.binary(max_size=200) | st.text(alphabet="host: capacity{}[]&*!|>-#'\"\n\t19MiB", max_size=120).map(str.encode)
)
def test_any_bytes_are_read_or_reported(data: bytes) -> None:
    problems: list = []
    layer = read_text(data, "f", problems)
    assert set(layer) <= set(FIELDS)
    assert all(str(problem).startswith("f") for problem in problems)


@given(st.lists(st.tuples(_KEYS, st.text(max_size=20) | st.integers().map(str)), max_size=8))
def test_any_options_are_taken_or_reported_one_by_one(pairs: list[tuple[str, str]]) -> None:
    options = [(key, text, "--set") for key, text in pairs]
    named = {key for key, _ in pairs}
    try:
        loaded = load(options=options, environment={}, etc=Path("/nonexistent"))
    except ConfigError as error:
        reported, taken = {problem.key for problem in error.problems}, named
    else:
        reported, taken = set(), {key for key, origin in loaded.origins.items() if origin == "--set"}
    assert taken == named
    assert reported <= set(FIELDS) | named
