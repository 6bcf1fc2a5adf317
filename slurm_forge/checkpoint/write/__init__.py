"""Saving: plan, copy, write, seal, publish; called by ``training.checkpointing.saver``.

Ranks agree on a name and on whether the last plan still fits.  Each copies what it writes into
memory that is kept from save to save; training continues after the copy, and a thread writes it
past the page cache and hashes it on the way.  At the end the ranks meet once, on a process group
used only by saves, and rank 0 publishes by one rename (``CheckpointStore.publish`` in
``store.directory``).

Entry: ``save``.
"""
