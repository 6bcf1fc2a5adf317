"""The site files that come with the package: checked, current, and what they ask for."""

from __future__ import annotations

import json
from datetime import date

import pytest

from docsite.site_files import made_from
from slurm_forge.site.checking import check_site, check_together
from slurm_forge.site.loading import LoadedSite, SitePlaces, Surroundings, packaged_folder

PLACES = SitePlaces(packaged=packaged_folder())
NAMES = PLACES.names()
#: Whether facts have become old is no reason for a test to fail one day.
THEN = date(2026, 12, 1)


@pytest.fixture(scope="module")
def sites() -> dict[str, LoadedSite]:
    return {name: PLACES.load(name) for name in NAMES}


def test_there_is_a_file_for_each_cluster_that_was_promised() -> None:
    promised = (
        "kempner mila cscs_clariden lumi_g tacc_vista olcf_frontier stanford_sherlock ulhpc_iris "
        "nersc_perlmutter idris_jean_zay jsc_juwels_booster cineca_leonardo princeton_della "
        "alliance generic test_cluster"
    )
    assert set(promised.split()) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wrong_with_it(name: str, sites: dict[str, LoadedSite]) -> None:
    loaded = sites[name]
    found = [each.at(loaded.document) for each in check_site(loaded.whole, THEN) if each.mistake]
    assert found == []


def test_no_two_claim_the_same_cluster(sites: dict[str, LoadedSite]) -> None:
    assert check_together({name: loaded.whole for name, loaded in sites.items()}) == ()


def test_what_is_made_from_the_files_is_current(sites: dict[str, LoadedSite]) -> None:
    root = packaged_folder().parent
    made = dict(made_from(loaded.whole for loaded in sites.values()))
    old = [path for path, text in made.items() if (root / path).read_text() != text]
    assert old == [], "scripts/site-pages writes them"
    pages = {f"docs/sites/{path.name}" for path in (root / "docs" / "sites").glob("*.md")}
    assert pages == {path for path in made if path.endswith(".md")} | {"docs/sites/contributing.md"}


def test_the_schema_names_every_key_and_no_other() -> None:
    schema = json.loads((packaged_folder() / "site.schema.json").read_text())
    generic = PLACES.load("generic").site
    assert set(schema["properties"]) == set(type(generic).model_fields)
    assert schema["additionalProperties"] is False
    assert "--gpus" not in json.dumps(schema["required"])


@pytest.mark.parametrize(
    ("here", "name", "because"),
    [
        (Surroundings(cluster_name="mila"), "mila", "Slurm's ClusterName is mila"),
        (
            Surroundings(variables={"NERSC_HOST": "perlmutter"}),
            "nersc_perlmutter",
            "NERSC_HOST is perlmutter",
        ),
        (
            Surroundings(cluster_name="juwels", variables={"SYSTEMNAME": "juwelsbooster"}),
            "jsc_juwels_booster",
            "SYSTEMNAME is juwelsbooster",
        ),
        (
            Surroundings(host="login2.vista.tacc.utexas.edu"),
            "tacc_vista",
            "this host is called login2.vista.tacc.utexas.edu",
        ),
        (
            Surroundings(cluster_name="fir", host="vista.tacc.utexas.edu"),
            "generic",
            "no site describes ClusterName fir",
        ),
        (Surroundings(variables={"NERSC_HOST": "cori"}), "generic", "no Slurm"),
        (Surroundings(host="vista.example"), "generic", "no Slurm"),
        (Surroundings(), "generic", "no Slurm"),
    ],
)
def test_a_cluster_is_told_by_its_surroundings(here: Surroundings, name: str, because: str) -> None:
    loaded = SitePlaces(packaged=packaged_folder(), here=here).load()
    assert (loaded.site.name, loaded.because) == (name, because)


def test_one_file_can_describe_several_clusters() -> None:
    def at(cluster: str) -> LoadedSite:
        here = Surroundings(variables={"CC_CLUSTER": cluster})
        return SitePlaces(packaged=packaged_folder(), here=here).load()

    tamia, fir = at("tamia"), at("fir")
    assert (tamia.site.name, tamia.cluster) == ("alliance", "tamia")
    assert tamia.site.facts("any").exclusive_nodes is True
    assert tamia.site.facts("any").max_time == fir.site.facts("any").max_time is not None
    assert (tamia.site.internet_on_compute_nodes, fir.site.internet_on_compute_nodes) == (
        False,
        True,
    )
    assert PLACES.load("alliance").site.internet_on_compute_nodes is None
