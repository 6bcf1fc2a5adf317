"""The report of ``doctor``, section by section.  Pure."""
