"""Compressed files as streams of bytes, and imports of optional packages."""

import gzip
import io
import lzma
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, cast, final

from raptr.extras import installed_by

COMPRESSED = (".gz", ".xz", ".zst")


def extra(module: str, name: str, reason: str) -> Any:
    """Import an optional package, or raise a ValueError that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ValueError(f"{reason}: needs the package {package}; {installed_by(name)}") from error


def decompressed(raw: BinaryIO, compression: str, path: Path) -> BinaryIO:
    """Return the uncompressed content of a file; `compression` is its suffix, or empty if it is not compressed."""
    if compression == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if compression == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(raw))
    if compression == ".zst":
        return cast(BinaryIO, io.BufferedReader(_Zstd(raw, extra("zstandard", "zst", str(path))), 2**17))
    return raw


@final
class _Zstd(io.RawIOBase):
    """Reads consecutive zstandard frames; the package's own reader takes a truncated file for a shorter one."""

    def __init__(self, raw: BinaryIO, package: Any) -> None:
        self._raw, self._package, self._frame, self._left = raw, package, None, b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._left or self._raw.read(2**16)
            if not data:
                if self._frame:
                    raise EOFError("it ends within a compressed frame")
                return 0
            frame = self._frame or self._package.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(frame.decompress(data))
            except self._package.ZstdError as error:
                raise OSError(str(error)) from error
            self._frame, self._left = (None, frame.unused_data) if frame.eof else (frame, b"")
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count
