"""The laboratory: experiments, benchmarks, convergence races and the command line."""
