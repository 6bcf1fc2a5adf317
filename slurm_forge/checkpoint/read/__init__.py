"""Loading: every block is verified before a byte of it is used; called by ``saver`` and ``export``.

``plain_dcp`` reads what plain DCP wrote, through an unpickler that can construct nothing else.

Entry: ``load``.
"""
