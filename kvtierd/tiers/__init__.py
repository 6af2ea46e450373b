"""The one owner of mutable state: blocks, slots, leases and moves."""
