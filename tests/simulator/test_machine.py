"""The PTX interpreter on kernels written for it: results, what it refuses, races and banks."""

from __future__ import annotations

import struct

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numpy")

from specplan.tools.simulator.machine import (  # noqa: E402
    Findings,
    Kernel,
    LaunchShape,
    SimulationError,
)
from specplan.tools.simulator.memory import AccessError, Memory  # noqa: E402
from specplan.tools.simulator.ptx import PtxError, entries  # noqa: E402

#: A kernel of one parameter, the address of its output; %rd1 holds it, %r1 the thread, %r2 the CTA.
KERNEL = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 4 kernel_param_0
)
{{
    .reg .pred %p<8>;
    .reg .b16 %rs<8>;
    .reg .b32 %r<32>;
    .reg .b64 %rd<16>;
    ld.param.b64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
{body}
    ret;
}}
"""
#: Where word %r10 of the output is: %rd3.
OUTPUT = """
    mul.wide.u32 %rd2, {index}, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.b32 [%rd3], {value};
"""


def run(
    body: str,
    words: int = 64,
    *,
    threads: int = 64,
    ctas: int = 1,
    cluster: int = 1,
    shared: int = 4096,
    banks: bool = False,
    start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Findings]:
    """The output of a kernel, and what else was seen."""
    kernel = Kernel(entries(KERNEL.format(body=body))["kernel"])
    out = torch.full((words,), -1, dtype=torch.int32) if start is None else start.clone()
    shape = LaunchShape((ctas, 1, 1), (threads, 1, 1), (cluster, 1, 1), shared)
    address = struct.pack("<Q", out.data_ptr())
    return out, kernel.launch(shape, [address], Memory([out]), banks=banks)


def output(value: str, index: str = "%r1") -> str:
    return OUTPUT.format(value=value, index=index)


def swap(barrier: str) -> str:
    """Each thread leaves its number in shared memory and reads that of another warp."""
    return f"""
    mov.b32 %r3, dynamic;
    shl.b32 %r4, %r1, 2;
    add.s32 %r5, %r3, %r4;
    st.shared.b32 [%r5], %r1;
    {barrier}
    xor.b32 %r6, %r5, 128;
    ld.shared.b32 %r7, [%r6];
    {output("%r7")}
"""


def test_a_barrier_orders_what_warps_leave_for_each_other() -> None:
    out, found = run(swap("bar.sync 0;"))
    assert out.tolist() == [thread ^ 32 for thread in range(64)]
    assert found.races == []


def test_a_missing_barrier_is_a_race_even_where_the_result_is_right() -> None:
    """Threads in step write before they read, so the output shows nothing."""
    out, found = run(swap(""))
    assert out.tolist() == [thread ^ 32 for thread in range(64)]
    (race,) = found.races
    assert (race.space, race.kinds) == ("shared", "write, read")
    assert (race.first, race.second) == (21, 24), "the lines of the store and of the load"
    assert {thread >> 5 for thread in race.threads} == {0, 1}
    assert "race in shared memory of kernel" in str(race)


def test_a_barrier_of_the_warp_does_not_order_other_warps() -> None:
    _, found = run(swap("bar.warp.sync -1;"))
    assert len(found.races) == 1
    within = swap("bar.warp.sync -1;").replace("128", "64")
    out, found = run(within)
    assert out.tolist() == [thread ^ 16 for thread in range(64)]
    assert found.races == []


def test_a_buffer_that_is_written_again_too_early() -> None:
    again = f"{swap('bar.sync 0;')}\n st.shared.b32 [%r5], %r2;"
    _, found = run(again)
    assert [race.kinds for race in found.races] == ["read, write"]
    _, found = run(
        again.replace("st.shared.b32 [%r5], %r2;", "bar.sync 0; st.shared.b32 [%r5], 0;")
    )
    assert found.races == []


def test_two_threads_that_leave_different_values_in_one_word() -> None:
    _, found = run(output("%r1", "%r2"))
    assert [(race.space, race.kinds) for race in found.races] == [("global", "two writes")]
    out, found = run(output("7", "%r2"))
    assert out[0] == 7 and found.races == [], "one value, in one instruction"


@pytest.mark.parametrize(("second", "kinds"), [("7", []), ("8", ["two writes"])])
def test_a_value_that_is_written_once_more_is_no_race(second: str, kinds: list[str]) -> None:
    _, found = run(
        f"""
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    setp.eq.s32 %p1, %r2, 0;
    @%p1 st.global.b32 [%rd3], 7;
    @!%p1 st.global.b32 [%rd3], {second};
""",
        ctas=2,
    )
    assert [race.kinds for race in found.races] == kinds


def test_ctas_are_not_ordered_by_barriers_of_their_own() -> None:
    body = (
        f"{output('%r2')}\n bar.sync 0; xor.b32 %r9, %r1, 1;"
        + """
    mul.wide.u32 %rd4, %r9, 4; add.s64 %rd5, %rd1, %rd4; ld.global.b32 %r8, [%rd5];"""
    )
    assert run(body)[1].races == []
    found = run(body, ctas=2)[1]
    assert {race.kinds for race in found.races} >= {"two writes"}
    assert {race.space for race in found.races} == {"global"}


def test_atomics_count_every_thread_and_are_no_race() -> None:
    out, found = run("red.relaxed.gpu.global.add.s32 [%rd1], 1;", ctas=3)
    assert out[0] == -1 + 3 * 64 and found.races == []
    # Of all threads that set a bit of a word of ones and threads that read it, none finds it clear.
    body = f"atom.shared.or.b32 %r8, [dynamic], 1; {output('%r8')}"
    out, found = run(body)
    assert out.tolist() == [-1] * 64 and found.races == []


COPY = """
    mov.b32 %r3, dynamic;
    shl.b32 %r4, %r1, 4;
    add.s32 %r5, %r3, %r4;
    mul.wide.u32 %rd2, %r1, 16;
    add.s64 %rd3, %rd1, %rd2;
    cp.async.cg.shared.global [%r5], [%rd3], 16;
    cp.async.commit_group;
    {wait}
    ld.shared.b32 %r7, [%r5];
    {out}
"""


def test_a_copy_lands_when_it_is_waited_for_and_not_before() -> None:
    start = torch.arange(256, dtype=torch.int32)
    body = COPY.format(wait="cp.async.wait_group 0;", out=output("%r7").replace("%rd3", "%rd6"))
    out, found = run(body, 256, start=start)
    assert out[:64].tolist() == [4 * thread for thread in range(64)]
    # Everyone overwrites what others copy from.
    assert [race.kinds for race in found.races] == ["read, write"]
    body = COPY.format(wait="", out=output("%r7").replace("%rd3", "%rd6"))
    out, _ = run(body, 256, start=start)
    assert out[:64].tolist() == [-1] * 64, "garbage"


def test_divergent_threads_meet_again_and_loops_end_by_thread() -> None:
    body = f"""
    mov.b32 %r3, 0;
    mov.b32 %r4, 0;
$loop:
    setp.ge.u32 %p1, %r3, %r1;
    @%p1 bra $done;
    add.s32 %r4, %r4, %r3;
    add.s32 %r3, %r3, 1;
    bra.uni $loop;
$done:
    shfl.sync.bfly.b32 %r5, %r4, 1, 31, -1;
    {output("%r5")}
"""
    out, _ = run(body)
    assert out.tolist() == [(t ^ 1) * ((t ^ 1) - 1) // 2 for t in range(64)]


REMOTE = """
    mov.b32 %r3, dynamic;
    st.shared.b32 [%r3], %r2;
    {before}
    xor.b32 %r4, %r2, 1;
    mapa.shared::cluster.u32 %r5, %r3, %r4;
    ld.shared::cluster.b32 %r6, [%r5];
    {after}
    {out}
"""
CLUSTER_BARRIER = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


def remote(before: str, after: str) -> Findings:
    body = REMOTE.format(before=before, after=after, out=output("%r6", "%r2"))
    out, found = run(body, ctas=2, cluster=2, threads=32)
    if before:
        assert out[:2].tolist() == [1, 0]
    return found


def test_clusters_read_each_other_between_their_barriers() -> None:
    assert remote(CLUSTER_BARRIER, CLUSTER_BARRIER).races == []
    assert [r.kinds for r in remote(CLUSTER_BARRIER, "").races] == ["read, end of its CTA"]
    with pytest.raises(SimulationError, match="which may not have started"):
        remote("", CLUSTER_BARRIER)


def test_threads_that_wait_for_ever_are_an_error() -> None:
    body = (
        "setp.lt.u32 %p1, %r1, 32; @%p1 bra $end; barrier.cluster.arrive.release.aligned; "
        "barrier.cluster.wait.acquire.aligned;\n$end:\n bar.sync 0;"
    )
    with pytest.raises(SimulationError, match="wait for ever"):
        run(body)
    with pytest.raises(SimulationError, match="line 18: a barrier in divergent code"):
        run("setp.lt.u32 %p1, %r1, 7; @%p1 bra $end;\n bar.sync 0;\n$end:\n bar.sync 0;")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("add.s64 %rd2, %rd1, 256; ld.global.b32 %r3, [%rd2];", "outside of every tensor"),
        ("ld.global.b32 %r3, [%rd1-4];", "outside of every tensor"),
        ("ld.global.v2.b32 {%r3, %r4}, [%rd1+4];", "not aligned"),
        ("ld.shared.b32 %r3, [dynamic+4096];", "shared access of 4 bytes at 4096..4096 of 4096"),
        ("mov.b32 %r3, 0; ld.shared.b32 %r4, [%r3];", "shared access"),
    ],
)
def test_accesses_outside_are_errors_that_name_the_line(body: str, said: str) -> None:
    with pytest.raises(AccessError, match=f"line 17: .*{said}"):
        run(body)


@pytest.mark.parametrize(
    "instruction",
    [
        "tanh.approx.f32 %r3, %r4;",
        "add.rz.f32 %r3, %r4, %r5;",
        "ld.local.b32 %r3, [%rd1];",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r3,%r4,%r5,%r6}, {%r7,%r8,%r9,%r10}, "
        "{%r11,%r12}, {%r3,%r4,%r5,%r6};",
        "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r3, %r4;",
        "fma.rn.ftz.f32 %r3, %r4, %r5, %r6;",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 16, "
        "[%r4];",
    ],
)
def test_an_instruction_that_it_does_not_know_is_named(instruction: str) -> None:
    with pytest.raises(PtxError, match=f"line 17: .*{instruction.split()[0].rstrip(';')}"):
        run(instruction)


@pytest.mark.parametrize(("stride", "further"), [(16, 0), (128, 7), (144, 0), (32, 1)])
def test_conflicts_of_banks_are_counted(stride: int, further: int) -> None:
    """16 bytes a thread: eight threads at a time fill the banks, if they lie apart."""
    body = f"""
    mov.b32 %r3, dynamic;
    and.b32 %r4, %r1, 7;
    mad.lo.s32 %r5, %r4, {stride}, %r3;
    ld.shared.v4.b32 {{%r6, %r7, %r8, %r9}}, [%r5];
"""
    _, found = run(body, threads=32, banks=True)
    ((count, passes),) = found.banks.values()
    assert (count, passes) == (1, 4 * further)


def test_batches_of_ctas_give_what_one_batch_gives() -> None:
    body = "mad.lo.s32 %r3, %r2, 64, %r1;" + output("%r3", "%r3")
    kernel = Kernel(entries(KERNEL.format(body=body))["kernel"])
    for batch in (64, 128, 4096):
        out = torch.zeros(64 * 5, dtype=torch.int32)
        shape = LaunchShape((5, 1, 1), (64, 1, 1))
        address = struct.pack("<Q", out.data_ptr())
        found = kernel.launch(shape, [address], Memory([out]), batch=batch)
        assert out.tolist() == list(range(320)) and found.races == []


#: A kernel that chooses one of two parameters of 8 bytes by their addresses, as the compiler writes
#: a choice among many; then word by word.
CHOICE = """
.visible .entry kernel(
    .param .u64 .ptr .global .align 4 kernel_param_0,
    .param .u64 kernel_param_1,
    .param .u32 kernel_param_2
)
{{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;
    ld.param.b64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 5;
    mov.b64 %rd2, kernel_param_1;
    mov.b64 %rd3, kernel_param_2;
    selp.b64 %rd4, %rd2, %rd3, %p1;
    {load}
    mul.wide.u32 %rd5, %r1, 4;
    add.s64 %rd6, %rd1, %rd5;
    st.global.b32 [%rd6], %r2;
    ret;
}}
"""


def chosen(load: str) -> torch.Tensor:
    kernel = Kernel(entries(CHOICE.format(load=load))["kernel"])
    out = torch.full((32,), -1, dtype=torch.int32)
    shape = LaunchShape((1, 1, 1), (32, 1, 1), (1, 1, 1), 0)
    arguments = [struct.pack("<Q", out.data_ptr()), struct.pack("<ii", -7, 9), struct.pack("<i", 4)]
    kernel.launch(shape, arguments, Memory([out]))
    return out


def test_a_parameter_is_loaded_by_an_address_that_was_chosen() -> None:
    assert chosen("ld.param.b32 %r2, [%rd4];").tolist() == [-7] * 5 + [4] * 27
    guarded = chosen("mov.b32 %r2, 1; @%p1 ld.param.s32 %r2, [%rd4+4];")
    assert guarded.tolist() == [9] * 5 + [1] * 27


@pytest.mark.parametrize(
    "load",
    [
        *("ld.param.b32 %r2, [%rd4+4];", "ld.param.b32 %r2, [%rd4-8];"),
        *("ld.param.b32 %r2, [%rd4+2];", "ld.param.b64 %rd7, [%rd4]; cvt.u32.u64 %r2, %rd7;"),
    ],
)
def test_a_load_beyond_the_chosen_parameter_is_an_error(load: str) -> None:
    with pytest.raises(AccessError, match="line 17: no parameter has"):
        chosen(load)
