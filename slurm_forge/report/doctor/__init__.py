"""The report of ``doctor``, section by section; called by the verb ``doctor``.

Entry: ``sections``.
"""
