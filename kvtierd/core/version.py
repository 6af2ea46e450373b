"""The version of the package: the only place it is written; the protocol and the format have versions of their own."""

VERSION = "0.1.0"
