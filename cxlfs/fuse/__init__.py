"""The mounted face of a store: pyfuse3 handlers, the life of a mount, and the control socket.

The only package with trio and pyfuse3, and the only one that speaks errno. ``mount``, ``unmount``,
``options`` and ``control_client`` import neither, so that a command line starts quickly.
"""
