"""Hypothesis profiles: derandomised in CI, so that a run can be repeated; random, with a printed seed, elsewhere."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A shared, busy machine decides no test: Hypothesis' deadline would be a timed assertion.
settings.register_profile("dev", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
