"""Asking the daemon of a mounted store: finding it, the protocol of its socket, errors on the way.

Knows no store and no media: what a request does is the daemon's business (``daemon``). Synchronous,
without trio, so that a command line starts quickly.
"""
