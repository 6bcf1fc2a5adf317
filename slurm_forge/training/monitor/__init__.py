"""The monitor process of each rank, the collective probe and step timing; started by the rank.

The rank writes its position into shared memory (``control.clock_page``); the monitor reads it every
second, reports it to the hub, and takes stacks when asked.

Entry: ``main``.
"""
