"""The README's server snippet as a program: store what the sampler accepted, then fetch the next
step's inputs.
"""

import specplan
import torch

pack = specplan.load()  # $SPECPLAN_PACKS, the installed wheel, or the per-user directory
pack.prepare()  # load GPU code now, not inside graph capture

B, S, T = 8, 16, 4  # requests of this step, store slots, tokens a request


def ints(*shape: int, high: int = 1000) -> torch.Tensor:
    return torch.randint(1, high, shape, dtype=torch.int32, device="cuda")


new, following, lens, drafts = ints(B, T), ints(B, T), ints(B, high=T + 1), ints(B, T - 1)
history, nexts, lengths, stored = ints(T, S, 1), ints(T, S, 1), ints(S), ints(S, T - 1)
slots = torch.randperm(S, device="cuda")[:B].int()
positions = slots.repeat_interleave(T)
input_ids, draft_ids, pos, kv = ints(B * T), ints(B * (T - 1)), ints(B * T), ints(B)
step = (new, following, lens, drafts, slots, history, nexts, lengths, stored, 0, B)
fetch = (
    nexts,
    stored,
    lengths,
    slots,
    positions,
    input_ids,
    draft_ids,
    pos,
    kv,
    0,
    0,
    0,
    0,
    B,
    T,
    T - 1,
)

if not (answer := pack.scatter(*step)):
    print(answer)  # family, cell, arch, reason, nearest certified cells
    specplan.reference.scatter(*step)  # the same result, in torch
pack.gather.require(*fetch)  # raises instead

launch = pack.scatter.bind(*step)  # fixed buffers: arguments converted once
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    launch()
    pack.gather.require(*fetch)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(input_ids.view(B, T), following) and torch.equal(kv, lens - T)
print("stored and fetched", pack)
