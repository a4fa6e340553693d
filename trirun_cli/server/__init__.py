"""The HTTP server: OpenAI's API over the engine. ``trirun serve`` runs it; :func:`.app.create_app` builds it."""
