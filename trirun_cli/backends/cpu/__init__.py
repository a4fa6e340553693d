"""The native decoder on a CPU."""
