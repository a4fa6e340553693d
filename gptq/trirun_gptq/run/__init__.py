"""What a run needs around the mathematics.

Begin with ``progress.py``, the one callback, and ``report.py``, what a run returns; ``preflight.py`` and
``memory.py`` look ahead, ``resume.py`` continues a stopped run, ``distributed.py`` joins several processes,
``profile.py`` counts time and memory.
"""
