"""Hugging Face's libraries without their running commentary."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LOGGERS = ("huggingface_hub", "datasets")


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Around reading from the hub: no line on stderr for every attempt, as what failed in the end is an exception. The
    attempts are the libraries' own, half a minute of them where the hub is out of reach (HF_HUB_OFFLINE=1: none)."""
    # Importing the libraries sets the levels that they are silenced from.
    import datasets  # noqa: F401

    before = {name: logging.getLogger(name).level for name in LOGGERS}
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Around loading a model: no progress, and no table of tensors that were not found, which are an error here."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
