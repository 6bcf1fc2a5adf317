"""Texts that are hard on shells, on sbatch, on terminals; some that only look like it."""

from __future__ import annotations

import random

_WHOLE = (
    "$(touch owned)", "`touch owned`", "; touch owned;", "&& touch owned", "| touch owned",
    "\ntouch owned\n", "> owned", "<(touch owned)", "$(<owned)", "'$(touch owned)'",
    '"$(touch owned)"', "'; touch owned; '", '"; touch owned; "', "\\'; touch owned; \\'",
    "${x:=$(touch owned)}", "$((a[$(touch owned)]))", "x\n#SBATCH --array=1-9",
    "x --array=1-9", "x' --array=1-9 '", 'x" --array=1-9 "', "x\\' --array=1-9 \\'",
    "x #SBATCH --wrap=owned", "--wrap=touch owned", " : --nodes=3", "packjob", "hetjob",
    "#hash", "a#b", "a #b", "100%", "%j%x%u", "%%", "\\", "a\\", "\\\\", "it's", 'say "so"',
    "$HOME", "~", "~root", "*", "?", "[a-z]*", "{a,b}", "{1..9}", "!!", "-x", "--", "-", "=",
    "a=b", "", " ", "  x  ", "\t", "a\tb", "a\rb", "a\x00b", "\x1b[31mred\x1b[0m", "\u202eevil",
    "\u2028", "\u00a0", "\ufeff", "\x7f", "ünï→code", "\U0001f600", "\udc80", "<<EOF\nx\nEOF",
    "function x { touch owned; }", "() { :;}; touch owned", "on", "null", "0", "1e9", "NaN",
    "a" * 300, "../../etc/passwd", "/dev/null", "a:b:c", "a,b", "n[1-3]", "{{ python }}",
    "{% include 'x' %}", "{latest}", "<image>", "${SLURM_JOB_ID}", "$'\\x41'", "\\$(touch owned)",
    "a\\\ntouch owned", "if true; then touch owned; fi", "exec touch owned", "0\ntouch owned",
)  # fmt: skip
_LETTERS = list("ab1 '\"\\$`();&|<>#*!{}[]~=-%:,@^\n\té→\u202e")
_COMMANDS = ("touch owned", "owned", "--array=1-9", "x")


def hostile(chance: random.Random) -> str:
    """One text: a known one, several of them in a row, or characters at random.

    Of half of them only what can be printed: the rest is refused nearly everywhere.
    """
    text = _any(chance)
    return text if chance.random() < 0.5 else "".join(c for c in text if c.isprintable())


def _any(chance: random.Random) -> str:
    kind = chance.random()
    if kind < 0.45:
        return chance.choice(_WHOLE)
    if kind < 0.65:
        return "".join(chance.choice(_WHOLE) for _ in range(chance.randint(2, 3)))
    if kind < 0.75:  # mostly what is allowed, around one that is not
        middle = chance.choice(_WHOLE)
        return f"{chance.choice(('a', 'data', 'x.y'))}{middle}{chance.choice(('', 'z', '/b'))}"
    opened = "".join(chance.choice(_LETTERS) for _ in range(chance.randint(0, 6)))
    closed = "".join(chance.choice(_LETTERS) for _ in range(chance.randint(0, 6)))
    return f"{opened}{chance.choice(_COMMANDS)}{closed}"
