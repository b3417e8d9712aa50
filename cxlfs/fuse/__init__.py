"""The kernel's requests: what they mean, and who carries them (pyfuse3, or workers in C).

The only room that speaks errno. Never here: mounting, unmounting, options (``daemon``), and what a
verb does to a store (``store``).
"""
