"""Evaluation, for ``trirun eval``: perplexity, divergence from the original, and lm-eval's tasks on one or two models.

:func:`.session.run` opens each :class:`.candidate.Candidate` (two where ``--model``, the baseline, is given beside
``--checkpoint``), runs every task on it and returns an :class:`.session.Evaluation`; :mod:`.report` makes the results
document of it and :mod:`.tables` the tables. Begin with :mod:`.session`. lm-eval's tasks, also over local files, are in
:mod:`.tasks`.
"""
