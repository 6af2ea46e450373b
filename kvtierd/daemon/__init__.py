"""The process: composition, lifecycle, signals, exit codes."""
