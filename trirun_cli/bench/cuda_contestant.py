"""A model on the CUDA decoder as ``trirun bench model`` times it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, MutableMapping, Sequence

import torch
from trirun_kernels.decoder.cuda import CudaDecoder, Inputs, Segment
from trirun_kernels.decoder.cuda_cache import MixerCaches, position_bytes, state_bytes, window_pages
from trirun_kernels.decoder.cuda_ops import PAGE
from trirun_kernels.decoder.cuda_weights import CudaModel

from ..backends.cuda.sampler import CudaSampler
from .timing import captured

STEPS = 4  # of one round: as in an engine that looks ahead, the next is launched before the last has ended
# Tokens of a prompt that run at once.
CHUNK = 2048

# Caches by the type of keys, layers, slots and blocks of 64 positions: models of one shape take turns with one, whose
# numbers are random anyway. Those that are in use, where values are weak references.
Shared = MutableMapping[tuple[torch.dtype, int, int, int], MixerCaches]


class CudaContestant:
    """Prefill and captured decode steps, greedy sampling included, of sequences whose cache holds random numbers."""

    settle_s = 0.25

    def __init__(self, name: str, model: CudaModel, shared: Shared, *, int8_cache: bool = False) -> None:
        self.name = f"{name}, int8 cache" if int8_cache else name
        self.weight_bytes, self._model = model.nbytes, model
        self._kind, self._shared = torch.int8 if int8_cache else model.dtype, shared

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> list[float]:
        """See :class:`~.models.Contestant`."""
        decoder = self._decoder(1, len(tokens), _first_layers(self._model))
        wanted = torch.tensor([len(tokens) - 1], device=self._model.device)
        return self._prompt(decoder, list(tokens), wanted)()[0].float().tolist()

    def room(self, batch: int, context: int) -> tuple[int, int]:
        """See :class:`~.models.Contestant`."""
        device, shape, blocks = self._model.device, self._model.shape, -(-(context + 1) // PAGE)
        # What PyTorch keeps for later is free too.
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if (self._kind, len(shape.layers), batch, blocks) in self._shared:
            return 0, free
        full, windowed = (PAGE * position_bytes(shape, self._kind, part) for part in (False, True))
        return batch * (blocks * full + self._kept(blocks) * windowed + state_bytes(shape)), free

    @torch.inference_mode()
    def open(self, batch: int, context: int) -> tuple[Callable[[], float], Callable[[], float]]:
        """See :class:`~.models.Contestant`."""
        decoder = self._decoder(batch, context + 1)
        # Zeros would flatter: they cost less power, and less of it means a higher clock.
        if decoder.scales is None:
            for layer in decoder.cache:
                layer.normal_()
        else:
            # As normal numbers would be: the largest of a head's is about 2.6.
            for layer, scales in zip(decoder.cache, decoder.scales, strict=True):
                for part in layer.flatten(0, 1).split(256):
                    part.copy_(torch.randn(part.shape, device=part.device).mul_(127 / 2.6).clamp_(-127, 127))
                scales.fill_(2.6 / 127)
        device, vocab = self._model.device, self._model.shape.vocab
        sampler = CudaSampler(batch, vocab, decoder.latest)
        slots = torch.arange(batch, dtype=torch.int32, device=device)
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(vocab, (context,), generator=generator).tolist()
        run = self._prompt(decoder, prompt, torch.tensor([context - 1], device=device))

        def prefill() -> None:
            sampler.sample(run(), slots[:1])

        # Each sequence has a token of its own: equal rows would all go to the same experts.
        tokens = torch.randint(vocab, (batch,), generator=generator, dtype=torch.int32).to(device)
        inputs = Inputs(tokens, slots, torch.full_like(slots, context))

        def step() -> None:
            sampler.sample(decoder.forward(inputs), slots)

        return _timed(prefill), _timed(_replayed(step), STEPS)

    def _kept(self, blocks: int) -> int:
        """Pages of a sequence in layers that see a window: no more than it and a chunk's rows need."""
        seen = window_pages(self._model.shape)
        return min(seen + CHUNK // PAGE, blocks) if seen else blocks

    def _decoder(self, slots: int, context: int, model: CudaModel | None = None) -> CudaDecoder:
        model = model or self._model
        blocks = -(-context // PAGE)
        key, kept = (self._kind, len(model.layers), slots, blocks), self._kept(blocks)
        decoder = CudaDecoder(
            model, slots=slots, context=context, kv_dtype=self._kind, caches=self._shared.get(key),
            windowed_pages=slots * kept if kept < blocks else None,
        )  # fmt: skip
        self._shared[key] = decoder.caches
        tables = decoder.block_tables
        slot, block = (torch.arange(count, device=tables.device) for count in (slots, blocks))
        tables[:, :blocks] = slot.unsqueeze(1) * blocks + block
        # Where layers have tables of their own, a slot's pages take turns.
        tables[:, blocks:] = (slot.unsqueeze(1) * kept + block % kept)[:, : tables.shape[1] - blocks]
        return decoder

    def _prompt(self, decoder: CudaDecoder, tokens: list[int], wanted: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Runs a prompt in slot 0, in chunks, and gives the logits after its last token."""
        pieces = []
        for first in range(0, len(tokens), CHUNK):
            piece = tokens[first : first + CHUNK]
            rows = (piece, [0] * len(piece), range(first, first + len(piece)))
            inputs = Inputs(*(torch.tensor(row, dtype=torch.int32, device=self._model.device) for row in rows))
            pieces.append((inputs, (Segment(0, len(piece), 0, first),) if len(piece) > 1 else ()))
        last = wanted % CHUNK

        def run() -> torch.Tensor:
            for inputs, segments in pieces:
                logits = decoder.forward(inputs, segments, last if inputs is pieces[-1][0] else last[:0])
            return logits

        return run


def _first_layers(model: CudaModel) -> CudaModel:
    """The whole model; of a mixture, the layers down to the first of the last kind."""
    layers = model.shape.layers
    if all(layer.mixture is None for layer in layers):
        return model
    count = 1 + max(layers.index(layer) for layer in layers)
    shape = dataclasses.replace(model.shape, layers=layers[:count])
    return dataclasses.replace(model, shape=shape, layers=model.layers[:count])


def _replayed(call: Callable[[], None]) -> Callable[[], None]:
    graph = captured([call])

    def replay(alive: Callable[[], None] = call) -> None:
        # A graph does not keep what it reads: `call` does.
        graph.replay()

    return replay


def _timed(call: Callable[[], None], repeats: int = 1) -> Callable[[], float]:
    """Seconds of one call on the device."""

    def run() -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.inference_mode():
            start.record()
            for _ in range(repeats):
                call()
            stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e-3 / repeats

    return run
