"""Benchmarks that a user runs on their own machine: `llamarl bench NAME`."""
