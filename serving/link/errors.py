"""Defines the errors of a link, divided by how the caller should react.

    LinkError
    ├── FrameError            the bytes are no frame of this protocol; the link ends
    ├── HandshakeError        the peer may not open a link (version, proof); retrying will not help
    ├── LinkClosedError       there is no open link; its requests have to be resumed elsewhere
    └── LinkCallError         the engine host answered a call with an error; the link is fine

None of them has an HTTP status: a link's failure is resumed, not shown to a client.
"""


class LinkError(Exception):
    """The base of all errors of a link."""


class FrameError(LinkError):
    """Reports a frame that is larger than allowed, or is not a message of this protocol."""


class HandshakeError(LinkError):
    """Reports that the peer may not open a link. Carries the reason, and never the secret."""


class LinkClosedError(LinkError):
    """Reports that the link is not open (any more). Carries the reason."""


class LinkCallError(LinkError):
    """Reports that the engine host could not do what a call asked for. Carries its message."""
