"""The documentation as a site: pages that are generated from the code, and how they are built."""
