"""Random histories of users who save, meddle, are killed, and lose power, against a plain model.

A history is a list of entries, drawn from one seed: a step of a program, an end of one, time that
passes, a power cut, an unmount. ``run.py`` plays one, ``programs.py`` has what users run,
``world.py`` does each thing to the store and to the model, ``model.py`` and ``sets.py`` say what
must be there. They speak of names and bytes, never of how the store remembers what was there.
"""
