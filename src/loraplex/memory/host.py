"""The host tier's ledger: which adapter images lie verified in host memory, within a bound of bytes.

Owns bytes and their bound; a loader moves them. An image is absent, on its way (its bytes are already
counted) or ready. Images of adapters on the device, or on their way there, are held: they are what a victim
is restored from. The disk store below this tier keeps every registered image, so giving one up loses nothing
but time.

Specification: 0x04A (hierarchy), 0x05D (verified host source); rulings "Residency", "Loading".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loraplex.core.errors import ErrorCode, InternalFault


class HostState(StrEnum):
    """Where an image is in its way to host memory."""

    FETCHING = "fetching"
    READY = "ready"


@dataclass(slots=True)
class HostImage:
    """One image. holds: device slots and copies that need it. last_use: serial of its last use."""

    kernel_digest: str
    nbytes: int
    state: HostState
    holds: int = 0
    last_use: int = 0


class HostTier:
    """Images by kernel digest, at most `limit_bytes` of them together. fetching: images on their way."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.fetches = self.fetched_bytes = self.failures = self.evictions = 0
        self.fetching = 0
        self._images: dict[str, HostImage] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._images)

    def get(self, kernel_digest: str) -> HostImage | None:
        """The image, wherever it is on its way; None when it is absent."""
        return self._images.get(kernel_digest)

    def ready(self, kernel_digest: str) -> bool:
        """Whether the image lies verified in host memory."""
        image = self._images.get(kernel_digest)
        return image is not None and image.state is HostState.READY

    @property
    def excess_bytes(self) -> int:
        """Bytes above the limit, after it was lowered."""
        return max(self.used_bytes - self.limit_bytes, 0)

    def begin(self, kernel_digest: str, nbytes: int) -> bool:
        """Count an image that will be fetched; False, with nothing changed, when the limit leaves no room."""
        if kernel_digest in self._images:
            raise InternalFault(
                ErrorCode.HOST_TIER_STATE, f"image {kernel_digest:.12} is already in the host tier"
            )
        if self.used_bytes + nbytes > self.limit_bytes:
            return False
        self._serial += 1
        self._images[kernel_digest] = HostImage(
            kernel_digest, nbytes, HostState.FETCHING, last_use=self._serial
        )
        self.used_bytes += nbytes
        self.fetches += 1
        self.fetching += 1
        return True

    def arrived(self, kernel_digest: str) -> None:
        """The loader verified the image in place."""
        image = self._expect(kernel_digest, HostState.FETCHING)
        image.state = HostState.READY
        self.fetching -= 1
        self.fetched_bytes += image.nbytes

    def failed(self, kernel_digest: str) -> None:
        """The loader could not bring it; its bytes are free again."""
        self._expect(kernel_digest, HostState.FETCHING)
        self._remove(kernel_digest)
        self.fetching -= 1
        self.failures += 1

    def hold(self, kernel_digest: str) -> None:
        """A device slot or a copy needs the image."""
        image = self._expect(kernel_digest, HostState.READY)
        image.holds += 1
        self.touch(kernel_digest)

    def let_go(self, kernel_digest: str) -> None:
        """Undo one `hold`."""
        image = self._expect(kernel_digest, HostState.READY)
        if image.holds < 1:
            raise InternalFault(
                ErrorCode.HOST_TIER_STATE, f"image {kernel_digest:.12} is let go more often than held"
            )
        image.holds -= 1

    def touch(self, kernel_digest: str) -> None:
        """Note a use."""
        self._serial += 1
        self._images[kernel_digest].last_use = self._serial

    def drop(self, kernel_digest: str) -> None:
        """Give an image up; refused while it is held or on its way."""
        image = self._expect(kernel_digest, HostState.READY)
        if image.holds:
            raise InternalFault(
                ErrorCode.HOST_TIER_STATE, f"image {kernel_digest:.12} is held by {image.holds} and stays"
            )
        self._remove(kernel_digest)
        self.evictions += 1

    def droppable(self) -> list[HostImage]:
        """Images that could be given up, least recently used first."""
        free = [i for i in self._images.values() if i.state is HostState.READY and not i.holds]
        return sorted(free, key=lambda image: image.last_use)

    def check(self) -> None:
        """Raise `host_tier_state` unless the bytes add up."""
        total = sum(image.nbytes for image in self._images.values())
        on_their_way = sum(image.state is HostState.FETCHING for image in self._images.values())
        if total != self.used_bytes or on_their_way != self.fetching:
            raise InternalFault(
                ErrorCode.HOST_TIER_STATE, f"the host tier counts {self.used_bytes} bytes, it holds {total}"
            )

    def _expect(self, kernel_digest: str, state: HostState) -> HostImage:
        image = self._images.get(kernel_digest)
        if image is None or image.state is not state:
            found = "absent" if image is None else image.state.value
            raise InternalFault(
                ErrorCode.HOST_TIER_STATE, f"image {kernel_digest:.12} is {found}, not {state.value}"
            )
        return image

    def _remove(self, kernel_digest: str) -> None:
        self.used_bytes -= self._images.pop(kernel_digest).nbytes
