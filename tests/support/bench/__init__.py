"""What ``scripts/bench`` measures: one module for each section, what they share, the report.

Never here: a judgement that can fail a test; a figure is only ever reported next to what it is
compared with, which was measured in the same run.
"""
