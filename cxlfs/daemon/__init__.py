"""The life of a mount: options, start, attach, preflight, serving, control server, detach, service.

The only room with an event loop. What a request of the kernel means is in ``fuse``, what it does in
``store``. ``mount``, ``unmount`` and ``options`` import neither trio nor pyfuse3, so that a command
line starts quickly.
"""
