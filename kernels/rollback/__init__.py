"""Rollback of rows that a verify step wrote and the target model rejected: save, then put back.

A verify step writes index-side cache rows (index keys of every sparse layer, the positions they
share) before it is known which draft tokens are accepted. ``gather`` copies the old rows of all
planes into a snapshot before the step's first write; ``restore`` or ``commit`` copies the rejected
ones back. Planes are moved as bits, whatever their dtype. Each op is one launch.

Arguments, all on one CUDA device; g, r, c: taken by gather, restore, commit; I is the cell's dtype,
int32 or int64. Vectors and tables are dense.

============  =======================  =====  ====================================================
argument      shape, dtype             ops    meaning
============  =======================  =====  ====================================================
planes        [planes, 8] int64        g r c  plane table: ``plans.rollback.Plane``, field by field
pages         [rows] I                 g r c  page of each verify row
within        [rows] I                 g r c  place of the row in its page
old           [>= rows, record] uint8  g r c  snapshot, row r of a plane at its ``record_offset``;
                                              16-byte aligned, row stride a multiple of 16
pending       [1] int32                g r c  the snapshot's shares, 0: not pending (zero at start)
rejected      [rows] int32             r      not 0: the row goes back
accepted      [requests] int32         c      accepted tokens n, the target model's own included
row_requests  [>= rows or 0] int32     c      request of each row; read only if tokens is 0
row_ordinals  [same] int32             c      ordinal of each row in its request; likewise
states        [states, 9] int64        c      state table: ``plans.rollback.State``, field by field
slots         [requests or 0] int32    c      state slot of each request; empty: nothing staged
cursors       [slots or 0] int32       c      replay cursors; empty: none
tokens        int32                    c      rows of a request, rows in request order; 0: listed
record_bytes  int32                    g r c  bytes of a record, from the layout
plane_count   int32                    g r c  planes, from the layout
splits        int32                    g r c  chunks of a plane's rows, from the plan; 0: no launch
overlap       int32, 0 or 1            g r c  programmatic dependent launch, from the plan
============  =======================  =====  ====================================================

- gather(planes, pages, within, old, pending, record_bytes, plane_count, splits, overlap)
- restore(planes, pages, within, old, pending, rejected, record_bytes, plane_count, splits, overlap)
- commit(planes, pages, within, old, pending, accepted, row_requests, row_ordinals, states, slots,
  cursors, tokens, record_bytes, plane_count, splits, overlap)

Semantics, for every plane and every row r whose page lies in [0, pages) and whose place lies in
[0, page_tokens); any other row is skipped, nothing wraps:

- gather: ``old[r] = plane[pages[r], within[r]]``; then the snapshot is pending.
- restore: ``plane[pages[r], within[r]] = old[r]`` where ``rejected[r]`` is not 0.
- commit: the same where ``ordinal(r) >= max(n, 1)``, n of the row's request. A row of no request
  (outside [0, requests)) is padding and stays. For each request g with slot s: in every state pool
  that has a slot s, ``pool[s] = candidates[g, min(max(n, 1), candidates) - 1]``, cast to the
  pool's dtype; and ``cursors[s] = max(n, 1) - 1`` if there is such a cursor. A dummy request has
  slot -1 and changes neither. A count below 1 is read as 1, everywhere.
- restore and commit do nothing unless the snapshot is pending, and consume it: a second one, with
  whichever op and grid, in a replayed graph too, is a no-op. Each CTA takes its share of
  ``pending`` when its threads have used what they read there, and all shares make what gather put
  there: no CTA of the launch that consumes a snapshot can find it consumed.

Nothing else is written: no other row, page, pool, slot or cursor, and in ``old`` no skipped row,
no row past ``rows`` and no byte between planes. Rows may share a place: they were saved with equal
bits, so the place goes back if any of them is rejected. Requests may share a slot only where they
write equal values.

The compiled module checks arity, dtypes, ranks, the tables' widths, equal lengths of pages, within
and rejected and of the two row lists, dense vectors and tables, ``old``'s alignment and row stride,
and devices. The host side raises RuntimeError and launches nothing unless ``old`` holds ``rows``
rows and the layout's record bytes, the plane table has the layout's planes, tokens >= 0, with
tokens 0 the lists hold ``rows`` entries, else rows = requests x tokens, slots is as long as
accepted or empty with nothing staged, and there are at most 64 states (the grid's second extent
stays below 65536). A Python wrapper must check that rows >= 1 (else nothing to do, no launch).

**How a server builds the tables**, once at start. For each cache tensor ``[pages, page_tokens,
*row]``, of any dtype, rows dense, pages and rows at any stride: ``plane(t.data_ptr(), page stride
in bytes, row stride in bytes, pages, page_tokens, row bytes)``. ``layout`` gives each its place in
a record, and ``table()`` the rows of the int64 tensor; ``state`` and ``state_table`` do the same
for staged states. The tables hold addresses: the caches, pools and candidate buffers must stay
where they are and outlive them. A launch reads the plane table before it waits for its predecessor,
so the upload must be complete (synchronise) before the first launch. ``old`` and ``pending`` are
allocated at the same time and kept; then every op can be captured.

Why it is as it is. Figures: one H200, nodes of a CUDA graph, 12 planes of 256-byte rows and one of
12 bytes, back to back over rotating buffers unless said otherwise; torch index ops for comparison:

- At 4 rows: gather 1.0 us, restore and commit 1.2, commit with two state pools 1.5 (torch: 54 and
  117). At 2048 rows, cold: gather 5.8 us, restoring all rows 5.9 (torch: 88 and 182; ``copy_`` of
  as many bytes in one piece: 5.1). In L2, with slower index loads than now: gather 3.5, restore
  3.6. All of this before records were aligned to cache lines (3088 bytes a record, not 3200).
- One CTA moves a chunk of one plane's rows, so that the access width (16, 8 or 4 bytes, by the
  plane's alignment) is a uniform branch and no specialization. The least power of two of lanes
  that covers a row copies it, at most one warp.
- A saved row is loaded when its verdict is known, although that is one dependent load more: what
  gather skipped was never written, and must not be read.
- ``overlap`` starts the launch while its predecessor drains, and reads the plane table meanwhile:
  1.0 us instead of 1.6 at 4 rows behind a launch that signals its dependents, as these do; behind
  one that does not (a torch kernel) 1.9 instead of 1.6.
- Tried and dropped: asking L2 for the rows before the wait (gather 5.4 us instead of 6.0 in the
  same run at 2048 rows, restore 6.7 instead of 6.1); 256 threads, 2 or 8 rows in flight per thread.
"""
