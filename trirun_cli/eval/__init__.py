"""Evaluation: scoring, lm-eval's tasks from the hub or from local files, divergence, and the results document."""
