"""Pure decisions: what to evict, to move, to admit."""
