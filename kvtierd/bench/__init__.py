"""Figures, each with its reference measured in the same run."""
