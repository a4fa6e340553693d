"""Who owns which part of the key-value cache: slots that keep their tokens, and pages that are shared."""

import random

import numpy as np
import pytest
from trirun_kernels.decoder.shape import DecoderShape

from trirun_cli.engine.cache_memory import affordable_context, available_bytes
from trirun_cli.engine.paged_cache import PagedCache
from trirun_cli.engine.runner import Admission
from trirun_cli.engine.slot_cache import COPY_LEAST, SlotCache
from trirun_cli.errors import OutOfMemoryError


def finish(cache, slot, tokens):
    cache.computed(slot, len(tokens))
    cache.release(slot, tokens)


class TestSlotCache:
    def test_a_conversation_finds_its_slot_again(self):
        cache = SlotCache(3, 100)
        first, second = list(range(10, 30)), list(range(50, 80))
        assert [cache.admit(first), cache.admit(second)] == [Admission(0, 0), Admission(1, 0)]
        finish(cache, 0, [*first, 1, 2])
        finish(cache, 1, [*second, 3, 4])
        assert cache.admit([*second, 3, 9, 9]) == Admission(1, 31)
        assert cache.admit([*first, 1, 2, 9]) == Admission(0, 22)

    def test_one_token_is_left_to_compute(self):
        cache = SlotCache(1, 100)
        cache.admit([1, 2, 3])
        finish(cache, 0, [1, 2, 3, 4, 5])
        assert cache.admit([1, 2, 3]) == Admission(0, 2)

    def test_empty_slots_and_those_free_for_longest_are_taken_first(self):
        cache = SlotCache(3, 100)
        assert cache.admit([1, 1]).slot == 0 and cache.admit([2, 2]).slot == 1
        finish(cache, 1, [2, 2])
        finish(cache, 0, [1, 1])
        assert [cache.admit([9, n]).slot for n in range(3)] == [2, 1, 0]
        assert cache.admit([9, 9]) is None

    def test_nothing_is_reused_where_that_is_asked(self):
        cache = SlotCache(1, 100)
        cache.admit([1, 2, 3])
        finish(cache, 0, [1, 2, 3])
        assert cache.admit([1, 2, 3, 4], reuse=False) == Admission(0, 0)

    def test_what_cannot_be_forgotten_must_be_continued(self):
        cache = SlotCache(1, 100, rewind=False)
        cache.admit([1, 2, 3])
        finish(cache, 0, [1, 2, 3, 4])
        assert cache.admit([1, 2, 9]) == Admission(0, 0)
        finish(cache, 0, [1, 2, 9])
        assert cache.admit([1, 2, 9, 4]) == Admission(0, 3)

    def test_prefixes_of_others_are_copied(self):
        copies = []
        cache = SlotCache(3, 500, copy=lambda *what: copies.append(what))
        system = list(range(COPY_LEAST * 2))
        assert cache.admit([*system, 1000, 1001]) == Admission(0, 0)
        # Not computed yet: nothing to copy.
        assert cache.admit([*system, 2000]) == Admission(1, 0) and not copies
        cache.computed(0, len(system))
        assert cache.admit([*system, 3000]) == Admission(2, len(system))
        assert copies == [(0, 2, len(system))]

    def test_a_long_conversation_is_not_lost_for_a_short_prefix(self):
        copies = []
        cache = SlotCache(2, 500, copy=lambda *what: copies.append(what))
        cache.admit(list(range(200)))
        finish(cache, 0, list(range(200)))
        assert cache.admit([*range(COPY_LEAST), 900]) == Admission(1, COPY_LEAST)
        assert copies == [(0, 1, COPY_LEAST)]
        # No other slot is free now.
        assert cache.admit([*range(COPY_LEAST), 901]) == Admission(0, COPY_LEAST) and len(copies) == 1

    def test_a_beginning_that_all_have_costs_no_one_a_conversation(self):
        cache = SlotCache(3, 500)
        assert cache.admit([1, *range(100, 150)]).slot == 0
        finish(cache, 0, [1, *range(100, 150)])
        assert cache.admit([1, 7, 7]) == Admission(1, 0)
        finish(cache, 1, [1, 7, 7])
        assert cache.admit([1, 8]) == Admission(2, 0)
        assert cache.admit([1, *range(100, 140)]) == Admission(0, 40)
        assert cache.admit([1, 9]) == Admission(1, 1)

    def test_usage_and_growth(self):
        cache = SlotCache(2, 10)
        assert cache.usage == 0
        cache.admit([1, 2, 3])
        assert cache.grow(0, 5) and cache.usage == 0.25
        assert cache.grow(0, 10) and not cache.grow(0, 11)


def paged(slots=4, pages=17, context=32, page_size=4, **windows):
    return PagedCache(slots, pages, context, page_size=page_size, **windows)


class TestPagedCache:
    def test_full_pages_of_a_prompt_are_shared_once_computed(self):
        cache = paged()
        prompt = list(range(10))
        first = cache.admit(prompt)
        assert first.reused == 0 and cache.admit(prompt) == Admission(1, 0)
        cache.computed(first.slot, 7)
        third = cache.admit(prompt)
        assert third.reused == 4 and cache.tables[third.slot, 0] == cache.tables[first.slot, 0]
        assert cache.tables[third.slot, 1] != cache.tables[first.slot, 1]
        cache.computed(first.slot, 10)
        assert cache.admit([*prompt[:8], 99]).reused == 8

    def test_pages_are_found_after_their_owner_is_gone(self):
        cache = paged()
        slot = cache.admit(list(range(10))).slot
        pages = cache.tables[slot].tolist()
        assert cache.grow(slot, 13)
        cache.release(slot, list(range(13)))
        assert cache.usage == 0 and not cache.tables.any()
        again = cache.admit(list(range(12)))
        assert again.reused == 8 and cache.tables[again.slot, :2].tolist() == pages[:2]
        assert cache.admit(list(range(13))).reused == 12
        # The page before counts, not only the tokens.
        assert cache.admit([*range(4, 8), 0, 0]).reused == 0

    def test_one_token_is_left_to_compute(self):
        cache = paged()
        finish(cache, cache.admit(list(range(8))).slot, list(range(8)))
        assert cache.admit(list(range(8))).reused == 4

    def test_admission_leaves_running_slots_a_page_each(self):
        cache = paged(slots=3, pages=9)
        first = cache.admit([1] * 12).slot
        assert cache.admit([2] * 20) is None
        second = cache.admit([2] * 16).slot
        assert cache.admit([3]) is None
        assert cache.grow(first, 16) and not cache.grow(second, 17) and cache.usage == 1
        cache.release(first, [1] * 15)
        assert cache.grow(second, 17) and not cache.grow(second, 33)

    def test_the_longest_unused_goes_first_and_ends_before_beginnings(self):
        cache = paged(slots=4, pages=9)
        for start in (0, 100):
            tokens = list(range(start, start + 16))
            finish(cache, cache.admit(tokens).slot, tokens)
        cache.admit([7] * 8)
        assert cache.admit(list(range(16))).reused == 8

    def test_page_zero_is_no_ones_and_a_context_must_fit(self):
        with pytest.raises(ValueError, match="8 pages of 4 positions do not hold a context of 32"):
            paged(pages=8)
        cache = paged(slots=1, pages=9)
        assert cache.admit([1] * 32) is not None and 0 not in cache.tables[0]

    def test_pages_are_neither_lost_nor_shared_by_accident(self):
        rng, cache, running = random.Random(0), paged(slots=6, pages=30), {}
        computed = {}
        for _ in range(4000):
            if running and rng.random() < 0.45:
                slot = rng.choice(list(running))
                tokens, length = running[slot], computed[slot]
                if rng.random() < 0.5 and len(tokens) < 32 and cache.grow(slot, len(tokens) + 1):
                    tokens.append(rng.randrange(2))
                    computed[slot] = len(tokens)
                else:
                    cache.release(slot, tokens[:length])
                    del running[slot]
            else:
                prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
                admission = cache.admit(prompt)
                if admission is not None:
                    assert admission.slot not in running and admission.reused < len(prompt)
                    running[admission.slot] = prompt
                    computed[admission.slot] = len(prompt)
                    cache.computed(admission.slot, len(prompt))
            # A page that two slots have holds the same tokens, at the same place, for both.
            contents = {}
            for slot, tokens in running.items():
                used = -(-len(tokens) // 4)
                assert (cache.tables[slot, :used] > 0).all() and len(set(cache.tables[slot, :used])) == used
                for index in range(used):
                    here = (index, tokens[: (index + 1) * 4])
                    assert contents.setdefault(int(cache.tables[slot, index]), here) == here
            assert cache.usage == pytest.approx(len(contents) / 29)
        assert cache._pool._references.count(0) == 30 - len(contents)

    def test_what_a_window_has_passed_is_given_back(self):
        cache = paged(slots=2, pages=40, context=64, window=8, windowed_pages=19)
        tokens = list(range(60))
        slot = cache.admit(tokens[:40]).slot
        for last in (8, 16, 24, 32, 40):
            assert cache.grow(slot, last)
            cache.computed(slot, last)
            held = np.flatnonzero(cache.tables[slot, 16:])
            # What the next step's first token sees, and a page more at most.
            assert held[-1] == last // 4 - 1 and held[0] <= max(last - 8, 0) // 4 and len(held) <= 2 + 2 + 3
        for length in range(41, 61):
            assert cache.grow(slot, length)
        assert np.count_nonzero(cache.tables[slot, 16:]) <= 5 and np.count_nonzero(cache.tables[slot, :16]) == 15
        cache.release(slot, tokens)
        assert cache.usage == 0 and not cache.tables.any()
        # The end of it can be continued; its middle cannot, where other pages than the last window's are gone.
        again = cache.admit([*tokens, 99])
        assert again.reused == 60 and np.flatnonzero(cache.tables[again.slot, 16:]).tolist() == [13, 14]
        assert cache.admit([*tokens[:48], 99] + [98] * 8).reused < 48

    def test_a_prompt_begins_where_both_kinds_of_pages_are(self):
        cache = paged(slots=3, pages=30, context=32, window=8, windowed_pages=8)
        first = list(range(16))
        slot = cache.admit(first).slot
        assert cache.grow(slot, 16)
        finish(cache, slot, first)
        assert cache.admit([*first, 99]).reused == 16
        cache = paged(slots=3, pages=30, context=32, window=8, windowed_pages=8)
        slot = cache.admit(first).slot
        assert cache.grow(slot, 16)
        finish(cache, slot, first)
        # Another prompt takes the windowed pages that were unused for longest: all but the first.
        other = cache.admit([7] * 24)
        assert cache.grow(other.slot, 24)
        cache.release(other.slot, ())
        assert cache.admit([*first, 99]).reused == 4

    def test_windows_lose_and_share_no_page_by_accident(self):
        rng, running, length = random.Random(1), {}, {}
        cache = paged(slots=6, pages=40, window=6, windowed_pages=22)
        for _ in range(6000):
            if running and rng.random() < 0.7:
                slot = rng.choice(list(running))
                tokens = running[slot]
                begin = length[slot]
                end = min(begin + rng.randrange(1, 6), len(tokens)) if begin < len(tokens) else begin + 1
                if rng.random() < 0.8 and end <= 32 and cache.grow(slot, end):
                    tokens += [rng.randrange(2)] * (end - len(tokens))
                    length[slot] = end
                    cache.computed(slot, end)
                else:
                    cache.release(slot, tokens[:begin])
                    del running[slot]
                    continue
                seen = range(max(begin + 1 - 6, 0) // 4, -(-end // 4))
                assert all(cache.tables[slot, 8 + index] > 0 for index in seen)
            else:
                prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
                if (admission := cache.admit(prompt)) is not None:
                    running[admission.slot], length[admission.slot] = prompt, admission.reused
            contents = {}
            for slot, tokens in running.items():
                for index in np.flatnonzero(cache.tables[slot, 8:]):
                    if (index + 1) * 4 <= length[slot]:
                        here = int(index), tokens[: (int(index) + 1) * 4]
                        assert contents.setdefault(int(cache.tables[slot, 8 + index]), here) == here
        for slot, tokens in running.items():
            cache.release(slot, tokens[: length[slot]])
        assert cache.usage == 0 and cache._windowed.free == 21 and cache._pool.free == 39


class TestCacheMemory:
    # 2 layers × 4 heads × 32 padded elements × 2 × 2 bytes: 1 KiB per position.
    SHAPE = DecoderShape.uniform(layers=2, hidden=64, ffn=64, heads=4, kv_heads=4, head_dim=20, vocab=10)

    def test_half_of_the_memory_is_shared_by_the_slots(self):
        assert affordable_context(self.SHAPE, 1, 8192, available=2**30) == 8192
        assert affordable_context(self.SHAPE, 16, 8192, available=2**26) == 2048
        assert affordable_context(self.SHAPE, 16, 8192, available=2**26 + 2**16) == 2048
        assert affordable_context(self.SHAPE, 1, 100, available=2**18) == 100

    def test_too_little_is_said(self):
        with pytest.raises(
            OutOfMemoryError,
            match=r"64 sequences of 512 tokens need 0\.03 GiB of cache, half of the free memory is 0\.02 GiB",
        ):
            affordable_context(self.SHAPE, 64, 8192, available=2**25)

    def test_the_system_says_what_is_available(self):
        assert 2**20 < available_bytes() < 2**50
