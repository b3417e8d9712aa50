"""The media format: what lies on the media byte for byte, how it is checked, read and written.

``layout`` declares it; ``superblock``, ``roots``, ``segments``, ``journal``, ``journal_reader``,
``operations`` and ``image`` each own one structure. Never here: what a structure means for files
and names, which segment is used for what, policy. Nothing that is read is trusted.
"""
