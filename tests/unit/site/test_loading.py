from __future__ import annotations

from pathlib import Path

import pytest

from slurm_forge.errors import ConfigError, UnsafeFileError
from slurm_forge.site.loading import SitePlaces, packaged_folder


@pytest.fixture
def places(tmp_path: Path) -> SitePlaces:
    packaged, own = tmp_path / "packaged", tmp_path / "own"
    write(packaged / "generic.yaml", "name: generic\n")
    write(packaged / "mila.yaml", "name: mila\ncluster_names: [mila]\ntitle: packaged\n")
    write(packaged / "della.yaml", "name: della\ncluster_names: [della]\n")
    return SitePlaces(packaged=packaged, user_folder=own)


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    path.parent.mkdir(exist_ok=True, mode=0o755)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_what_is_asked_for_wins_over_the_cluster_name(places: SitePlaces) -> None:
    loaded = places.load("della", cluster_name="mila")
    assert loaded.site.name == "della"
    assert "asked" in loaded.because


def test_the_cluster_name_finds_the_site(places: SitePlaces) -> None:
    loaded = places.load(cluster_name="mila")
    assert loaded.site.title == "packaged"
    assert "mila" in loaded.because


@pytest.mark.parametrize("cluster_name", [None, "", "elsewhere", "Mila", "generic"])
def test_an_unknown_cluster_is_generic(places: SitePlaces, cluster_name: str | None) -> None:
    assert places.load(cluster_name=cluster_name).site.name == "generic"


def test_ones_own_file_replaces_the_packaged_one(places: SitePlaces, tmp_path: Path) -> None:
    write(tmp_path / "own" / "mila.yaml", "name: mila\ncluster_names: [mila]\ntitle: mine\n")
    assert places.load("mila").site.title == "mine"
    assert places.load(cluster_name="mila").site.title == "mine"
    assert places.names() == ("della", "generic", "mila")


def test_the_knob_counts_where_nothing_is_asked_for(places: SitePlaces) -> None:
    knob = SitePlaces(packaged=places.packaged, knob="della")
    assert knob.load(cluster_name="mila").site.name == "della"
    assert knob.load("mila").site.name == "mila"


def test_a_file_in_the_current_directory_counts_only_if_named_by_path(
    places: SitePlaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    write(here / "mila.yaml", "name: mila\ncluster_names: [mila]\ntitle: planted\n")
    write(here / "other.yaml", "name: other\ncluster_names: [other]\n")
    monkeypatch.chdir(here)
    assert places.load("mila").site.title == "packaged"
    assert places.load(cluster_name="other").site.name == "generic"
    with pytest.raises(ConfigError):
        places.load("other")
    assert places.load("./mila.yaml").site.title == "planted"


@pytest.mark.parametrize("where", ["own", "elsewhere"])
def test_a_file_that_others_can_write_is_refused(
    places: SitePlaces, tmp_path: Path, where: str
) -> None:
    path = write(tmp_path / where / "open.yaml", "name: open\n", 0o666)
    with pytest.raises(UnsafeFileError):
        places.load("open" if where == "own" else str(path))


def test_an_unknown_name_lists_the_known_ones(places: SitePlaces) -> None:
    with pytest.raises(ConfigError) as mistake:
        places.load("milla")
    assert 'did you mean "mila"' in str(mistake.value)
    assert "della, generic, mila" in str(mistake.value)


def test_a_name_that_differs_from_the_file_is_a_mistake(places: SitePlaces, tmp_path: Path) -> None:
    write(tmp_path / "own" / "mine.yaml", "title: copied\nname: mila\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml") as mistake:
        places.load("mine")
    assert mistake.value.line == 2


def test_every_packaged_site_is_well_formed_and_claims_its_own_cluster() -> None:
    places = SitePlaces(packaged=packaged_folder())
    claimed: list[str] = []
    assert {"generic", "test_cluster"} <= set(places.names())
    for name in places.names():
        claimed += places.load(name).site.cluster_names
    assert len(claimed) == len(set(claimed))


def test_the_generic_site_knows_nothing_and_names_every_key() -> None:
    loaded = SitePlaces(packaged=packaged_folder()).load("generic")
    nothing = type(loaded.site)(name="generic", title=loaded.site.title)
    assert loaded.site == nothing
    assert loaded.site.model_fields_set == set(type(loaded.site).model_fields)
