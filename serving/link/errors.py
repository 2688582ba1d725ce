"""What can go wrong on a link, as a caller has to treat it.

    LinkError
    ├── FrameError            the bytes are no frame of this protocol; the link ends
    ├── HandshakeError        the peer may not open a link (version, proof); retrying will not help
    ├── LinkClosedError       there is no open link; its requests have to be resumed elsewhere
    └── LinkCallError         the engine host answered a call with an error; the link is fine

None of them has an HTTP status: a link's failure is resumed, not shown to a client.
"""


class LinkError(Exception):
    """Anything that goes wrong on a link."""


class FrameError(LinkError):
    """A frame is larger than allowed, or is not a message of this protocol."""


class HandshakeError(LinkError):
    """The peer may not open a link. Carries the reason, and never the secret."""


class LinkClosedError(LinkError):
    """The link is not open (any more). Carries the reason."""


class LinkCallError(LinkError):
    """The engine host could not do what a call asked for. Carries its message."""
