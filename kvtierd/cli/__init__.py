"""kvtierctl: one command per file."""
