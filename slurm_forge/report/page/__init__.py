"""The HTML page of a run or of several: what it shows, and how that becomes one file.

Called by the verb ``report`` and by the process of that name.
"""
