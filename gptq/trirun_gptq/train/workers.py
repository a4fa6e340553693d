"""One process per device, or a single process: the little that training must know of it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from trirun_kernels.weights.experts import SeparateExperts


class Workers:
    """The processes of a run. Started by ``accelerate launch`` or ``torchrun``, there are several.

    Attributes:
        rank, count: this process and how many there are. device: where it computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.count, self.device = 0, 1, device
        self._accelerator: Any = None
        # Set by both launchers; without one of them there is a single process.
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import Accelerator

            self._accelerator = Accelerator(cpu=device.type == "cpu")
            self.rank, self.count = self._accelerator.process_index, self._accelerator.num_processes
            self.device = self._accelerator.device

    @property
    def first(self) -> bool:
        """Whether this process writes files and messages."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module, with gradients averaged over all processes and parameters equal to the first process's."""
        if self._accelerator is None:
            return module
        if any(isinstance(part, SeparateExperts) for part in module.modules()):
            from accelerate import DistributedDataParallelKwargs

            # Which experts have gradients is another matter in every process.
            self._accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        return self._accelerator.prepare_model(module, device_placement=False)

    def mean(self, values: Tensor) -> Tensor:
        """The mean of a tensor over all processes."""
        return values if self._accelerator is None else self._accelerator.reduce(values, "mean")
