"""`kvtierctl report`: what benches and the stress have measured, as one page with plots and as BENCHMARKS.md."""
