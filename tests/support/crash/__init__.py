"""The crash campaign: recorded workloads, every image that a power cut may leave, and a judge.

``world``      a fixed clock and fixed random numbers, so that equal bytes mean an equal recovery
``tape``       a workload while it is recorded, and the states that it commits
``masks``      which words of those in flight reached the media
``footprint``  what an execution read, and outcomes remembered by it
``examiner``   one media on which image after image is recovered, judged, and undone
``runner``     a tape cut everywhere
``operations`` what workloads are made of; ``single``, ``programs``: the workloads
``levels``, ``campaign``  units of work, processes, results
"""
