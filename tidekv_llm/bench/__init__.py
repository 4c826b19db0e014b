"""Benchmarks: every figure in the README comes from here, each method in a fresh process."""
