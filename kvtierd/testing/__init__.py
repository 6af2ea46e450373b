"""Fakes and fault injection, shipped so that others can test against us."""
