"""lm-eval's tasks: :mod:`.resolve` finds them by name, :mod:`.offline` builds them over local data files by the
:mod:`.row_schemas` of their rows, :mod:`.harness` runs them, and :mod:`.scores` are their results. Begin with
:mod:`.resolve`."""
