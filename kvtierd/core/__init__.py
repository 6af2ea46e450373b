"""Identity, geometry, errors, units and time: what every other package shares; imports nothing of ours."""
