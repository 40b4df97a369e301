"""Asynchronous strategies. Begin with `strategy`, their template; `registry` says where each of them lies."""
