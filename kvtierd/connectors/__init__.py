"""Thin clients of inference engines."""
