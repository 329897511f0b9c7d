"""The ranks that share a step. Their exchanges wait for a limited time, and the error says which rank is missing.

Each exchange is one collective, whatever the shapes. ``sent`` counts the bytes that leave this rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

GRACE = 5.0  # seconds for the waiting ranks to report themselves, once one has noticed that another is missing
LONGEST = 1800.0  # seconds that an exchange may wait where the process group has no time-out


class RankMissing(RuntimeError):
    """A rank took no part in an exchange within the time allowed; the message names it where that can be known."""


class Ranks:
    """The ranks along one mesh axis or in one process group.

    Attributes:
        size: how many; ``rank``: which one of them this process is.
        sent: bytes that have left this rank through ``exchange`` and ``agree`` so far.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.timeout, self.sent, self._count = wait_of(group), 0, 0
        self._device = _control_device(group)

    def __deepcopy__(self, memo: Any) -> Ranks:
        """Return itself: a copied optimizer works with the same ranks."""
        return self

    def agree(self, values: Sequence[int]) -> list[list[int]]:
        """Return the values of every rank, in the order of ranks; integers from 0 to 255, equally many on each rank.

        Raises:
            RankMissing: a rank did not come within the group's time-out.
        """
        mine = torch.tensor(values, dtype=torch.uint8, device=self._device)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(every, mine, group=self.group, async_op=True), self._device)
        self.sent += len(values) * (self.size - 1)
        return torch.stack(every).tolist()

    def exchange(self, out: Sequence[Sequence[Tensor]], sizes: Sequence[int], like: Tensor) -> list[Tensor]:
        """Return, for each rank, the flat tensor of ``sizes[rank]`` elements that it sent to this one.

        Args:
            out: for each rank, the tensors to send to it, all of one dtype and device. Those for this rank itself are
                returned without being sent.
            sizes: elements that come from each rank.
            like: any tensor of that dtype and device.
        """
        flat = [torch.cat([t.reshape(-1) for t in tensors]) if tensors else like.new_empty(0) for tensors in out]
        own, flat[self.rank] = flat[self.rank], like.new_empty(0)
        coming = [0 if rank == self.rank else size for rank, size in enumerate(sizes)]
        going, received = [t.numel() for t in flat], like.new_empty(sum(coming))
        self._wait(
            lambda: dist.all_to_all_single(received, torch.cat(flat), coming, going, group=self.group, async_op=True),
            like.device,
        )
        self.sent += sum(going) * like.element_size()
        parts = list(received.split(coming))
        parts[self.rank] = own
        return parts

    def _wait(self, start: Any, device: torch.device) -> None:
        self._count += 1
        try:
            work = start()
            if device.type == "cpu":
                work.wait(timedelta(seconds=self.timeout))
            else:
                work.wait()  # only the stream waits; NCCL's own watchdog ends a wait that is too long
        except RuntimeError as error:
            raise RankMissing(
                f"{missing(self.group, f'exchange-{self._count}')} exchange {self._count} of the optimizer within "
                f"{self.timeout:.0f} s ({str(error).splitlines()[0]})"
            ) from error


def missing(group: Any, what: str) -> str:
    """Return "rank 2 took no part in", after a short wait in which every other rank reports that it is here."""
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    key = f"sandbox/{what}/" + ",".join(map(str, ranks)) + "/"
    try:
        store = dist.distributed_c10d._get_default_store()  # private; without it nobody is named
        store.set(key + str(dist.get_rank()), "here")
        until = time.monotonic() + GRACE
        absent = ranks
        while absent and time.monotonic() < until:
            absent = [rank for rank in absent if not store.check([key + str(rank)])]
            time.sleep(0.05)
    except (AttributeError, RuntimeError):
        return "some rank (the store of the process group is gone too) took no part in"
    if not absent:
        return "a rank broke off"
    return f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))} took no part in"


def wait_of(group: Any) -> float:
    """Return the time-out of a process group in seconds."""
    try:
        return min(LONGEST, group._get_backend(_control_device(group)).options._timeout.total_seconds())
    except (AttributeError, RuntimeError, ValueError):  # private, and not there in every version
        return LONGEST


def _control_device(group: Any) -> torch.device:
    """Return the device for small messages: the CPU if the group has a backend for it."""
    try:
        cpu = "gloo" in str(dist.get_backend_config(group)) or dist.get_backend(group) in ("gloo", "fake")
    except (AttributeError, RuntimeError, ValueError):
        cpu = dist.get_backend(group) == "gloo"
    return torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())
