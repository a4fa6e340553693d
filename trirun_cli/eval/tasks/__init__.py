"""lm-eval's tasks: found by name, built over local data files, run question by question."""
