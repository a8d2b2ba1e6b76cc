"""What a fabric needs to know, once."""

from dataclasses import dataclass

from kvfabric.slots import slot_stride

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class FabricConfig:
    listen: str
    """`ucx://0.0.0.0:0` (any port) or `inproc://name`."""
    fingerprint: bytes
    """32 bytes: what KV means in this process."""
    generation: int
    """Unlike that of every other process that ever served at this address; 64 bits."""
    facts: str = ""
    """What the fingerprint is of, for people; see kvfabric/facts.py."""
    advertise_host: str | None = None
    """Host by which peers reach this one; None: as in `listen`."""
    slot_nbytes: int = 4 * MIB
    """Largest payload of a frame."""
    send_slots: int = 8
    recv_slots: int = 8
    checksum: bool = True
    """Compute xxh3_64 of every payload sent. One that comes is always verified."""
    connect_timeout_s: float = 2.0
    """For each of: connecting, and the handshake."""
    send_timeout_s: float = 10.0
    """For each frame: handed to the network → received by the peer."""
    offer_timeout_s: float = 5.0
    """A frame on offer, for which a slot is kept: from the peer's frame before it → here. Packing
    and the network are in it; whoever falls silent gives the slots back."""
    first_frame_timeout_s: float = 120.0
    """An expected transfer: `expect` → its first frame. Queueing and computing come first."""
    transfer_timeout_s: float = 30.0
    """A transfer that has begun: from one sign of life to the next."""

    faults: str = ""
    """Rules by which messages sent are harmed, for tests; see kvfabric/faults.py."""

    @property
    def staging_nbytes(self) -> int:
        """How much staging memory `Fabric` wants."""
        return (self.send_slots + self.recv_slots) * slot_stride(self.slot_nbytes)
