"""The loader's own store: images in the region where there is room, in files of their own where there is
none.

Keeps the region's books and is the only one that writes into it, so there is one for each host folder. A part
of the region is free again when its image is dropped: an engine drops none that a copy still reads or a slot
may be restored from.

Specification: 0x04A (host tier), 0x05D (verified host source); rulings "Loading".
"""

from __future__ import annotations

import os
from pathlib import Path

from loraplex.core.errors import InternalFault
from loraplex.core.layout import AdapterImage
from loraplex.images.adoption import PageThreads, fill_pages
from loraplex.images.disk_store import ImageStore, write_all
from loraplex.images.image_file import ImageFile, placed_file
from loraplex.images.region import Room


class HostStore(ImageStore):
    """An `ImageStore` over a host folder with or without a region."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """What an earlier loader of the same engine placed stays where it is."""
        super().__init__(directory)
        self._places = {digest: place for digest in self.digests() if (place := self._placed(digest))}
        region = self.region()
        self._room = None if region is None else Room(region.memory.size, tuple(self._places.values()))

    def adopt(self, image: AdapterImage, threads: PageThreads | None = None) -> Path:
        """See `ImageStore.adopt`; in the region, nothing waits for memory."""
        region, room = self.region(), self._room
        nbytes = image.pages.nbytes
        if region is None or room is None or not nbytes or self._is_whole(image.kernel_digest):
            return super().adopt(image, threads)
        self.delete(image.kernel_digest)  # a damaged one: no file may name a part that others are given
        offset = room.take(nbytes)
        if offset is None:
            return super().adopt(image, threads)
        try:
            content = placed_file(image, offset)
            fill_pages(image, region.span(offset, nbytes).reshape(image.pages.shape), threads)
            path = self._write_file(image.kernel_digest, lambda fd: write_all(fd, content), durable=False)
        except BaseException:
            room.give(offset, nbytes)
            raise
        self._places[image.kernel_digest] = (offset, nbytes)
        return path

    def delete(self, kernel_digest: str) -> bool:
        """Remove an image; its part of the region is free afterwards. Returns whether it was there."""
        there = super().delete(kernel_digest)
        self._give_back(kernel_digest)
        return there

    def _give_back(self, kernel_digest: str) -> None:
        place = self._places.pop(kernel_digest, None)
        if place is not None and self._room is not None:
            self._room.give(*place)

    def _placed(self, kernel_digest: str) -> tuple[int, int] | None:
        """Where an image lies in the region; a file that cannot be read is removed."""
        try:
            fd = os.open(self._path(kernel_digest), os.O_RDONLY | os.O_CLOEXEC)
            return ImageFile(fd, kernel_digest).place()
        except (FileNotFoundError, InternalFault):
            super().delete(kernel_digest)
            return None
