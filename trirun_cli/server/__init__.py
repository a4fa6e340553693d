"""The HTTP server of ``trirun serve``: OpenAI's API over the engine.

A request passes :mod:`.guard` (key, size, log), :mod:`.schema` and :mod:`.other_fields` (validation), :mod:`.service`
(tokens and sampling parameters) and becomes a :class:`.request_group.RequestGroup` in the engine. Its events come back
through :mod:`.event_bridge`, become deltas of text, and leave as the documents of :mod:`.replies`. Begin with
:mod:`.app`, which has the routes; :mod:`.pool` has the models by their names; :mod:`.run` is the life of the process.
"""
