"""The thread that makes masks of grammars."""

from __future__ import annotations

import os
import threading

import pytest

from trirun_cli.backends.cuda.mask_thread import MaskThread


def test_tokens_are_taken_before_it_returns_and_masks_are_there_in_the_end():
    thread, seen, go_on = MaskThread(), [], threading.Event()

    def fill():
        go_on.wait(10)
        seen.append("filled")

    for _ in range(3):
        seen.clear()
        go_on.clear()
        thread.begin(lambda: seen.append("taken"), fill)
        assert seen == ["taken"]
        go_on.set()
        thread.end()
        assert seen == ["taken", "filled"]
    thread.end()


def test_what_goes_wrong_is_raised_in_the_end_and_the_next_lot_is_made():
    thread, seen = MaskThread(), []

    def fail():
        raise KeyError("token")

    for take, fill in ((fail, lambda: seen.append("filled")), (lambda: None, fail)):
        thread.begin(take, fill)
        with pytest.raises(KeyError, match="token"):
            thread.end()
    assert not seen
    thread.begin(lambda: None, lambda: seen.append("filled"))
    thread.end()
    assert seen == ["filled"]


def test_it_leaves_a_processor_alone():
    thread, where = MaskThread(), []
    allowed = os.sched_getaffinity(0)
    thread.begin(lambda: where.append(os.sched_getaffinity(0)), lambda: None)
    thread.end()
    assert os.sched_getaffinity(0) == allowed
    assert where == [allowed - {max(allowed)} if len(allowed) > 1 else allowed]
