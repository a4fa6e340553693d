"""A whole decode step in one kernel."""
