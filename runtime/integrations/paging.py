"""Blocks of a server's K/V cache cut into smaller pages by a view: no copy, no other kernel.

vLLM's blocks have as many tokens as make them as large as a page of recurrent state (1600, 3200,
784 ...), which no problem of the catalog has. A block of N tokens is also N / P pages of P tokens,
wherever the distance of blocks is a whole number of pages. The pages of a view are an index space:
they may overlap in memory, and only those that the table names are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Pages that a table of int32 can name.
_MOST_PAGES = (1 << 31) - 1


@dataclass(frozen=True)
class Recut:
    """How the blocks of a cache are cut.

    Attributes
    ----------
    page_size
        Tokens of a page.
    pages_of_block
        Pages that a block holds.
    pages_between
        Pages of the index space from one block to the next.
    """

    page_size: int
    pages_of_block: int
    pages_between: int

    def steps(self, device: torch.device | str) -> torch.Tensor:
        """What :meth:`table_into` adds to each block: int32 [pages of a block]; made once."""
        return torch.arange(self.pages_of_block, dtype=torch.int32, device=device)

    def table_into(
        self, block_table: torch.Tensor, steps: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """The table of pages, in one launch: once a step for all layers of one layout.

        Parameters
        ----------
        block_table
            int32 or int64 [requests, columns], any strides; negative for none.
        steps
            Of :meth:`steps`.
        out
            int32 [requests, columns * pages of a block], columns dense: it is what the op takes as
            ``block_table``. A block of none becomes pages of none.
        """
        requests, columns = block_table.shape
        wanted = (requests, columns * self.pages_of_block)
        if out.dtype is not torch.int32 or tuple(out.shape) != wanted:
            raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, expected int32 {wanted}")
        by_block = out.view(requests, columns, self.pages_of_block)
        torch.add(steps, block_table[:, :, None], alpha=self.pages_between, out=by_block)
        return out


def recut(cache: torch.Tensor, page_size: int) -> tuple[torch.Tensor, Recut]:
    """A cache ``[blocks, kv_heads, block_tokens, width]`` (any block, head and token strides) as a
    view ``[pages, kv_heads, page_size, width]`` of the same memory, and how it was cut.

    An NHD cache is given as ``cache.permute(0, 2, 1, 3)``. K and V of one cache have one
    :class:`Recut`, and so have all layers that lie alike.

    Raises
    ------
    ValueError
        Where no such view exists: the block is no whole number of pages, or blocks lie at no whole
        number of pages from each other (padding between them, or layers inside a block).

    Example
    -------
    ::

        k, cut = recut(kv[..., :256], 32)
        v, _ = recut(kv[..., 256:], 32)
        steps = cut.steps(kv.device)                       # once
        cut.table_into(block_table, steps, page_table)     # once a step
    """
    if cache.dim() != 4:
        raise ValueError(f"a cache is {tuple(cache.shape)}, expected 4 dimensions")
    blocks, heads, tokens, width = cache.shape
    block_stride, head_stride, token_stride, last = cache.stride()
    if last != 1:
        raise ValueError(f"the elements of a row are {last} apart, expected 1")
    if page_size < 1 or tokens % page_size:
        raise ValueError(f"blocks of {tokens} tokens are no whole number of pages of {page_size}")
    page = page_size * token_stride
    if block_stride % page:
        raise ValueError(
            f"blocks are {block_stride} elements apart, no whole number of pages of {page_size} "
            f"tokens, which are {page} elements"
        )
    cut = Recut(page_size, tokens // page_size, block_stride // page)
    if blocks > 1 and cut.pages_between < cut.pages_of_block:
        raise ValueError(
            f"blocks of {tokens} tokens begin {cut.pages_between * page_size} tokens apart: blocks "
            "lie inside each other"
        )
    pages = (blocks - 1) * cut.pages_between + cut.pages_of_block if blocks else 0
    if pages > _MOST_PAGES:
        raise ValueError(f"{pages} pages, more than int32 can name; take a larger page")
    shape = (pages, heads, page_size, width)
    view = cache.as_strided(shape, (page, head_stride, token_stride, 1), cache.storage_offset())
    return view, cut
