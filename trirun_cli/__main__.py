"""``python -m trirun_cli``."""

from .app import main

main()
