"""Plain and exact forms of the kernels, to check them against."""
