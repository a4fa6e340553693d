"""Connections: the process that listens, and what is around the application."""
