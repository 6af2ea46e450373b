"""The nvme tier: segments, recovery and the I/O engines. FORMAT.md is normative."""
