"""What a reply grants, and the request that gives it back.

It is the same for a daemon whose reply found nobody as for a client that does not want it any more.
"""

from __future__ import annotations

from kvtierd.protocol.messages import (
    Abort,
    AcquireReply,
    AnyReply,
    AnyRequest,
    CloseSequence,
    Release,
    ReserveReply,
    SequenceReply,
)


def giving_back(reply: AnyReply) -> AnyRequest | None:
    """The request that undoes what a reply granted; None where it granted nothing."""
    match reply:
        case ReserveReply(reservation=number) if number:
            return Abort(id=0, reservation=number)
        case AcquireReply(lease=number) if number:
            return Release(id=0, leases=[number], quiet=True)
        case SequenceReply(sequence=number) if number:
            return CloseSequence(id=0, sequences=[number], quiet=True)
    return None
