"""Benchmarks: random weights at real sizes, a peer in the same run, a last line of JSON."""
