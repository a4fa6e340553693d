"""The native decoder on a GPU."""
