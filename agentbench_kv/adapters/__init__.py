"""Benchmarks as tasks: a folder each, on the contract in `base`."""
