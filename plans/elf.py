"""What an ELF file takes from others and gives to them, read from its own tables."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

#: ``e_machine`` by host.
MACHINES: Mapping[str, int] = {"x86_64": 62, "aarch64": 183}

_SYMTAB, _DYNAMIC, _DYNSYM, _VERNEED = 2, 6, 11, 0x6FFFFFFE
_NEEDED, _SONAME = 1, 14
_GLOBAL, _WEAK = 1, 2
_HIDDEN = (1, 2)


class ElfError(ValueError):
    """Bytes that are no 64-bit little-endian ELF file, or a damaged one."""


@dataclass
class Elf:
    """One object or shared object.

    Attributes
    ----------
    machine
        ``e_machine``; :data:`MACHINES` has those of the hosts.
    defined, undefined
        Symbols that others can take from it, and that it takes from others. Weak ones that it can
        do without are not among the undefined.
    needed, soname
        Libraries that it names, and its own name, of a shared object.
    versions
        Symbol versions that it needs, by library: ``{"libc.so.6": {"GLIBC_2.2.5"}}``.
    """

    machine: int
    defined: set[str] = field(default_factory=set)
    undefined: set[str] = field(default_factory=set)
    needed: list[str] = field(default_factory=list)
    soname: str | None = None
    versions: dict[str, set[str]] = field(default_factory=dict)


def read(data: bytes) -> Elf:
    """Read the bytes of an object or a shared object."""
    try:
        return _read(data)
    except (struct.error, IndexError, ValueError) as error:
        if isinstance(error, ElfError):
            raise
        raise ElfError(f"a damaged ELF file ({error})") from error


def _read(data: bytes) -> Elf:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ElfError("not a 64-bit little-endian ELF file")
    kind, machine = struct.unpack_from("<HH", data, 16)
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    found = Elf(machine)

    def text(strings: int, offset: int) -> str:
        start = sections[strings][4] + offset
        return data[start : data.index(b"\0", start)].decode()

    shared = kind == 3
    for _, of, _, _, offset, length, strings, items, _, _ in sections:
        if of == (_DYNSYM if shared else _SYMTAB):
            for at in range(offset, offset + length, 24):
                name, info, other, section = struct.unpack_from("<IBBH", data, at)
                if name == 0 or info >> 4 not in (_GLOBAL, _WEAK):
                    continue
                if section != 0:
                    if other & 3 not in _HIDDEN:
                        found.defined.add(text(strings, name))
                elif info >> 4 == _GLOBAL:
                    found.undefined.add(text(strings, name))
        elif of == _DYNAMIC:
            for at in range(offset, offset + length, 16):
                tag, value = struct.unpack_from("<QQ", data, at)
                if tag == _NEEDED:
                    found.needed.append(text(strings, value))
                elif tag == _SONAME:
                    found.soname = text(strings, value)
        elif of == _VERNEED:
            for _ in range(items):
                _, versions, library, first, following = struct.unpack_from("<HHIII", data, offset)
                at = offset + first
                for _ in range(versions):
                    _, _, _, name, further = struct.unpack_from("<IHHII", data, at)
                    found.versions.setdefault(text(strings, library), set()).add(
                        text(strings, name)
                    )
                    at += further
                offset += following
    return found


def members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """The files of a static library, by name."""
    if archive[:8] != b"!<arch>\n":
        raise ElfError("not a static library")
    at, long_names = 8, b""
    while at + 60 <= len(archive):
        name = archive[at : at + 16].rstrip()
        length = int(archive[at + 48 : at + 58])
        body = archive[at + 60 : at + 60 + length]
        at += 60 + length + length % 2
        if name == b"//":
            long_names = body
        elif name not in (b"/", b"/SYM64/"):
            if name[:1] == b"/":
                start = int(name[1:])
                name = long_names[start : long_names.index(b"\n", start)]
            yield name.rstrip(b"/").decode(), body
