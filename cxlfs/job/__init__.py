"""One checkpoint of a whole training job, over many nodes with a store each.

``protocol`` decides, without input or output, what each rank does and what all of them agree on. It
knows neither files nor messages' ways: whoever drives it saves, stores and tells.

Never: opens a store or knows its format. A checkpoint lies in a mounted directory.
"""
