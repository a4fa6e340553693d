"""What a command calls and a program can call: ``quantize``, ``pack``, ``finetune`` and ``diagnose``, a file each.

Plain arguments in, a report out; they print nothing. Progress goes to a callback, see :mod:`trirun_gptq.run.progress`.
Begin with ``quantize.py``; ``*_plan.py`` resolves and checks options before the long part, ``finetune_start.py`` and
``finetune_publish.py`` are where a training begins and ends.
"""
