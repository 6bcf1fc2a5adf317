"""Options as sbatch reads them from a script; tests/slurm/test_sites.py asks the real one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.launch.render.sbatch_options import as_directive
from slurm_forge.slurm.text.directives import read_directives


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("#!/bin/sh\n#SBATCH --nodes=2\n\n # x\n#SBATCH --mem=4G\ntrue", ["--nodes=2", "--mem=4G"]),
        ("#SBATCH --nodes=2\ntrue\n#SBATCH --array=1-9", ["--nodes=2"]),
        ("#SBATCH --nodes=2\n. x # first\n#SBATCH --array=1-9", ["--nodes=2"]),
        ("#SBATCH -N 2 --mem=4G # --array=1-9", ["-N", "2", "--mem=4G"]),
        ("#SBATCH --partition=a#b", ["--partition=a"]),
        ("#SBATCH --comment='a b' --mem=4G", ["--comment=a b", "--mem=4G"]),
        ("#SBATCH --comment=\"it's\" ", ["--comment=it's"]),
        (r"#SBATCH --comment='it\'s #1'", ["--comment=it's #1"]),
        (r"#SBATCH --comment=a\\b\"", ['--comment=a\\b"']),
        ("#SLURM --nodes=3", ["--nodes=3"]),
        (" #SBATCH --nodes=3", []),
        ("#sbatch --nodes=3", []),
        ("#SBATCH--nodes=3", ["--nodes=3"]),
        ("#SBATCH", []),
    ],
)  # fmt: skip
def test_reads_what_sbatch_reads(script: str, options: list[str]) -> None:
    assert list(read_directives(script)) == options


@pytest.mark.parametrize("line", ["#SBATCH --comment='a", '#SBATCH --a="', "#SBATCH -N 2 : -N 3"])
def test_what_sbatch_refuses_to_read(line: str) -> None:
    with pytest.raises(ValueError, match=r"unmatched|unexpected"):
        read_directives(line)


@given(
    st.from_regex(r"--[a-z][a-z0-9-]{0,12}=", fullmatch=True),
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"])),
        st.text(st.sampled_from(list("ab '\"\\#:-=$`")), max_size=12),
    ),
)
def test_any_text_is_one_option_and_arrives_as_it_is(name: str, value: str) -> None:
    line = f"#SBATCH {as_directive(name + value)}"
    assert read_directives(f"#!/bin/bash\n{line}\ntrue\n") == (name + value,)


def test_what_needs_no_quotes_has_none() -> None:
    for option in ("--requeue", "--gres=gpu:a100:4", "--constraint=a&b|[c*2]", "--signal=USR2@120"):
        assert as_directive(option) == option
