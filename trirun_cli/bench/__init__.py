"""Benchmarks: kernels, whole models and servers, timed beside what they compete with."""
