"""The wire: messages, codec, server, clients. SPEC.md is normative."""
