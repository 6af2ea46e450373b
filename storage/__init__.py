"""The nvme tier: segments, recovery and the I/O engines. FORMAT.md is normative."""

from kvtierd.storage.interface import BlockStore, Extent, IoMode, ReadItem, Recovered, WriteItem
from kvtierd.storage.store import SegmentStore

__all__ = ["BlockStore", "Extent", "IoMode", "ReadItem", "Recovered", "SegmentStore", "WriteItem"]
