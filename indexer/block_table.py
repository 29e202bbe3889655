"""Pages of a cache handed to requests, and the table that maps positions to slots."""

from __future__ import annotations

import torch

from ..kernels.checks import check_int
from ..kernels.slots import indices_to_slots


class BlockTable:
    """[R, pages] int32: the page ids of every request, −1 where none is allocated.

    Every cache of a model, target's and draft's, shares the ids: position p of request r lives at
    slot `table[r, p // S]·S + p % S` of each.

    Args:
        max_num_reqs: R, rows of the table.
        max_model_len: the longest sequence of a request.
        num_pages: pages in the caches.
        page_size: S, tokens a page.
        device: where the table lives.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        *,
        num_pages: int,
        page_size: int = 64,
        device: torch.device | str | None = None,
    ) -> None:
        check_int("max_num_reqs", max_num_reqs, minimum=1)
        check_int("max_model_len", max_model_len, minimum=1)
        self.page_size = check_int("page_size", page_size, minimum=1)
        self.max_model_len = max_model_len
        self.pages_per_request = -(-max_model_len // page_size)
        self.table = torch.full(
            (max_num_reqs, self.pages_per_request), -1, dtype=torch.int32, device=device
        )
        self._free = list(range(check_int("num_pages", num_pages, minimum=1)))
        self._owned: list[list[int]] = [[] for _ in range(max_num_reqs)]

    @property
    def num_free_pages(self) -> int:
        """Pages that no request owns."""
        return len(self._free)

    def can_allocate(self, request: int, length: int) -> bool:
        """Whether `request` could hold `length` tokens now."""
        return self._missing_pages(request, length) <= len(self._free)

    def allocate(self, request: int, length: int) -> None:
        """Gives `request` pages for `length` tokens, keeping those it has.

        Raises:
            ValueError: when `length` exceeds max_model_len, or no page is left.
        """
        if length > self.max_model_len:
            raise ValueError(f"length must be at most {self.max_model_len}, got {length}")
        missing = self._missing_pages(request, length)
        if missing > len(self._free):
            raise ValueError(
                f"request {request} needs {missing} more pages for {length} tokens,"
                f" {len(self._free)} are free"
            )
        if missing <= 0:
            return
        owned = self._owned[request]
        pages, self._free = self._free[:missing], self._free[missing:]
        self.table[request, len(owned) : len(owned) + missing] = torch.tensor(
            pages, dtype=torch.int32
        )
        owned.extend(pages)

    def release(self, request: int) -> None:
        """Takes every page of `request` back."""
        self._free.extend(self._owned[request])
        self._owned[request] = []
        self.table[request].fill_(-1)

    def slots(self, positions: torch.Tensor, row_to_request: torch.Tensor) -> torch.Tensor:
        """The int64 slot of each row's position [T]; −1 where no page is allocated."""
        return positions_to_slots(positions, self.table, row_to_request, self.page_size)

    def _missing_pages(self, request: int, length: int) -> int:
        return -(-length // self.page_size) - len(self._owned[request])


def positions_to_slots(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    row_to_request: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """Slots [T] int64 of one position a row; −1 outside the table or for request −1."""
    # a cast alone would make a position past 32 bits a small one
    far = torch.iinfo(torch.int32).max
    column = positions.clamp(-1, far).to(torch.int32).unsqueeze(1)
    slots = indices_to_slots(column, block_table, row_to_request, page_size)
    return slots.squeeze(1).to(torch.int64)
