"""Device code: found in objects, hashed as the driver gets it, with its registers and its
local-memory traffic.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from specplan.plans import device_code
from specplan.plans.plan import Plan
from specplan.tools.build import keys

from support import packs

CUDA = 190
LOAD_LOCAL, STORE_LOCAL, OTHER = 0x7983, 0x2387, 0x7984


def elf(kernels: dict[str, list[int]], registers: list[int], machine: int = CUDA) -> bytes:
    """A CUDA ELF image with one ``.text`` section a kernel, of 16-byte instructions with these
    opcodes, and its ``.nv.info``.
    """
    info = struct.pack("<BBHI", 3, 0x36, 0, 0)[
        :4
    ]  # an attribute with its value in the header, which must be stepped over
    info += struct.pack("<BBHQ", 4, 0x11, 8, 0x63)  # a sized attribute of another kind
    for index, count in enumerate(registers):
        info += struct.pack("<BBHII", 4, 0x2F, 8, index, count)
    bodies = {".nv.info": info}
    for name, opcodes in kernels.items():
        bodies[f".text.{name}"] = b"".join(struct.pack("<HHIQ", op, 0x2F, 0, 0) for op in opcodes)
    names = b"\0" + b"\0".join(n.encode() for n in (*bodies, ".shstrtab")) + b"\0"
    bodies[".shstrtab"] = names
    sections, data, at = [struct.pack("<IIQQQQIIQQ", *([0] * 10))], b"", 64
    for name, body in bodies.items():
        start = names.index(name.encode() + b"\0")
        sections.append(
            struct.pack("<IIQQQQIIQQ", start, 1, 0, 0, at + len(data), len(body), 0, 0, 16, 0)
        )
        data += body
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH",
        *(2, machine, 1, 0, 0, at + len(data), 0, 64, 0, 0, 64, len(sections), len(sections) - 1),
    )
    return head + data + b"".join(sections)


def test_registers_are_the_most_of_all_kernels_and_spills_the_sum() -> None:
    image = elf(
        {"b": [OTHER, LOAD_LOCAL, STORE_LOCAL], "a": [LOAD_LOCAL, OTHER]}, registers=[24, 255, 40]
    )
    found = device_code.read(image)
    assert found.kernels == ("a", "b")
    assert found.registers == 255
    assert found.spills == 3
    assert found.size == len(image)
    assert found.sha256 == hashlib.sha256(image).hexdigest()


def test_a_kernel_without_local_memory_has_no_spills() -> None:
    found = device_code.read(elf({"a": [OTHER] * 5}, registers=[16]))
    assert (found.registers, found.spills) == (16, 0)


def test_images_are_found_wherever_they_lie_and_host_code_is_passed_over() -> None:
    first, second = elf({"a": [OTHER]}, [8]), elf({"b": [OTHER, OTHER]}, [9])
    host = elf({"main": [OTHER]}, [1], machine=62)
    data = host + b"x" * 13 + first + b"\x7fELF" + second + b"tail"
    assert list(device_code.images(data)) == [first, second]
    assert list(device_code.images(host)) == []
    assert list(device_code.images(b"")) == []


@pytest.mark.parametrize("cut", [1, 64, 200])
def test_a_truncated_image_is_not_an_image(cut: int) -> None:
    image = elf({"a": [OTHER] * 8}, [8])
    assert list(device_code.images(image[:-cut])) == []
    assert list(device_code.images(image[:20])) == []


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_what_nvcc_reports_is_what_is_read(tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text(
        """
        extern "C" __global__ void lean(int *p) { p[threadIdx.x] += 1; }
        extern "C" __global__ void spilled(float *p) {
            float v[64];
            #pragma unroll
            for (int i = 0; i < 64; ++i) v[i] = p[i * 32 + threadIdx.x];
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < 64; ++i) p[(63 - i) * 64 + threadIdx.x] = v[i] * v[(i * 7) % 64];
        }
        """
    )
    found = {}
    for kernel, limit in (("lean", 255), ("spilled", 24)):
        text = source.read_text()
        alone = tmp_path / f"{kernel}.cu"
        marks = [m.start() for m in re.finditer(r'extern "C"', text)]
        alone.write_text(text[marks[0] : marks[1]] if kernel == "lean" else text[marks[1] :])
        cubin = tmp_path / f"{kernel}.cubin"
        done = subprocess.run(
            [
                "nvcc",
                "-cubin",
                "-arch=sm_90a",
                f"-maxrregcount={limit}",
                "-Xptxas=-v",
                "-o",
                cubin,
                alone,
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        data = cubin.read_bytes()
        assert list(device_code.images(data)) == [data]
        found[kernel] = device_code.read(data)
        said = re.search(r"Used (\d+) registers", done.stderr)
        assert said is not None
        assert found[kernel].registers == int(said[1])
        assert found[kernel].kernels == (kernel,)
        assert found[kernel].sha256 == hashlib.sha256(data).hexdigest()
        assert (found[kernel].spills > 0) == (" 0 bytes spill stores" not in done.stderr)
    assert found["lean"].spills == 0
    assert found["spilled"].spills > 0


def test_linked_objects_hold_exactly_the_device_code_that_the_manifest_names(
    small_pack: packs.SmallPack,
) -> None:
    for family, record in small_pack.manifest.objects.items():
        data = (small_pack.directory / record.file).read_bytes()
        found = [device_code.read(image) for image in device_code.images(data)]
        plans = [p for p in small_pack.manifest.plans.values() if p.family == family]
        assert sorted(code.sha256 for code in found) == sorted(p.device_code for p in plans)
        assert len({p.device_code for p in plans}) == len(plans)
        by_hash = {code.sha256: code for code in found}
        for plan in plans:
            code = by_hash[plan.device_code]
            assert (code.registers, code.spills) == (plan.registers, plan.spills)
            assert 0 < plan.registers <= 255


def test_the_hash_is_that_of_the_compilers_own_cubin(
    small_pack: packs.SmallPack, tmp_path: Path
) -> None:
    plan = next(p for p in small_pack.manifest.plans.values() if p.family == "gather")
    script = (
        "import sys\nsys.modules['torch'] = None\nimport cutlass.cute as cute\n"
        "from specplan.kernels.gather import kernel\n"
        "from specplan.plans.plan import Plan\n"
        f"plan = Plan('gather', 'gather', 'sm_90a', {plan.spec!r})\n"
        "function, arguments = kernel.lower(plan)\n"
        "cute.compile(function, *arguments, options=sys.argv[1])\n"
    )
    options = keys.options(Plan("gather", "gather", "sm_90a", plan.spec))
    done = packs.run(
        [sys.executable, "-c", script, f"{options} --keep-cubin --dump-dir {tmp_path}"],
        cwd=tmp_path,
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    (cubin,) = tmp_path.rglob("*.cubin")
    assert hashlib.sha256(cubin.read_bytes()).hexdigest() == plan.device_code
