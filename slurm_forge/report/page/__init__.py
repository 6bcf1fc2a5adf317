"""The HTML page of a run or of several; called by the verb ``report`` and its process.

Entry: ``run_page``; as a file: ``html``.
"""
