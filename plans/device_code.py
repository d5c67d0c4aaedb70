"""Device code inside objects: find it, hash it, and read its registers and local-memory traffic.

A compiled plan carries its device code as a CUDA ELF image in the data of a host object. The bytes
found here are the bytes that the driver gets, so a hash of them binds a certificate to what runs,
whatever file they travel in.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_ELF = b"\x7fELF\x02\x01\x01"
_MACHINE_CUDA = 190
_NV_INFO_REGISTERS = 0x2F
#: Low 12 bits of the first word of the 16-byte instructions that load from and store to local
#: memory, sm_70 to sm_120.
_LOCAL_OPCODES = frozenset({0x983, 0x387})


@dataclass(frozen=True)
class DeviceCode:
    """One CUDA ELF image.

    Attributes
    ----------
    sha256
        Of the image's bytes.
    kernels
        Entry names, sorted.
    registers
        Registers a thread, the most of all kernels.
    spills
        Instructions that load from or store to local memory, in all kernels: 0 means that nothing
        was spilled.
    """

    sha256: str
    size: int
    kernels: tuple[str, ...]
    registers: int
    spills: int


def images(data: bytes) -> Iterator[bytes]:
    """The CUDA ELF images in the bytes of an object or shared object, in order."""
    at = data.find(_ELF)
    while at >= 0:
        image = _image(data, at)
        if image is not None:
            yield image
            at = data.find(_ELF, at + len(image))
        else:
            at = data.find(_ELF, at + 1)


def _image(data: bytes, at: int) -> bytes | None:
    if at + 64 > len(data) or struct.unpack_from("<H", data, at + 0x12)[0] != _MACHINE_CUDA:
        return None
    program_offset, section_offset = struct.unpack_from("<QQ", data, at + 0x20)
    program_size, program_count, section_size, section_count = struct.unpack_from(
        "<HHHH", data, at + 0x36
    )
    end = max(
        program_offset + program_size * program_count, section_offset + section_size * section_count
    )
    return data[at : at + end] if at + end <= len(data) else None


def read(image: bytes) -> DeviceCode:
    """Hash one image and read what the compiler noted about its kernels."""
    section_offset = struct.unpack_from("<Q", image, 0x28)[0]
    size, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", image, section_offset + index * size)
        for index in range(count)
    ]
    names_at = sections[names_index][4]

    def name(section: tuple[int, ...]) -> str:
        start = names_at + section[0]
        return image[start : image.index(b"\0", start)].decode()

    registers, spills = 0, 0
    kernels: list[str] = []
    for section in sections:
        label, offset, length = name(section), section[4], section[5]
        if label == ".nv.info":
            registers = max([registers, *_attributes(image[offset : offset + length])])
        elif label.startswith(".text."):
            kernels.append(label.removeprefix(".text."))
            spills += sum(
                struct.unpack_from("<H", image, at)[0] & 0xFFF in _LOCAL_OPCODES
                for at in range(offset, offset + length, 16)
            )
    return DeviceCode(
        hashlib.sha256(image).hexdigest(), len(image), tuple(sorted(kernels)), registers, spills
    )


def _attributes(info: bytes) -> Iterator[int]:
    """The register counts of an ``.nv.info`` section: (format, attribute, size) headers, sized
    payloads.
    """
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:
            if attribute == _NV_INFO_REGISTERS:
                yield struct.unpack_from("<II", info, at)[1]
            at += size
