"""What a run needs around the mathematics: preflight, memory plan, resume, progress, profile, several processes."""
