"""A figure's files: all of them or none, the same bytes every time, and where they came from."""

import json
import math
import os
import subprocess
import sys
import zlib
from pathlib import Path

import matplotlib
import pandas as pd
import pytest

from sandbox.config import DataConfig, MuonConfig, RunConfig
from sandbox.plots import COLUMN, panels, plot_loss
from sandbox.records.record import RunRecord
from sandbox.records.report import DPI, provenance, save_figure

DATA = pd.DataFrame({"config_hash": "a", "step": [1, 2, 3], "train_loss": [3.0, 2.5, 1 / 3]})
WORLD = {"corpus_hash": "2161f45a", "commit": "dee2e00", "versions": {"torch": "2.13.0"}, "seed": 0}


def figure():
    return plot_loss(DATA).figure


def record(seed=0, **more):
    run = RunConfig(seed=seed, device="cpu", dtype="float32", optimizer=MuonConfig(orthogonalize_dtype="float32"))
    return RunRecord(
        **{"config": run, "hash": f"hash{seed}", "status": "finished", "environment": WORLD | {"seed": seed}} | more
    )


def bytes_of(paths):
    return {ending: path.read_bytes() for ending, path in paths.items()}


def fonts(pdf):
    """The uncompressed text of a PDF's objects, where its fonts are declared."""
    text = pdf
    for part in pdf.split(b"stream\n")[1:]:
        try:
            text += zlib.decompressobj().decompress(part)
        except zlib.error:
            continue
    return text


def test_a_figure_becomes_five_files(tmp_path):
    paths = save_figure(figure(), "head", records=[record()], data=DATA, folder=tmp_path)
    assert paths == {e: tmp_path / f"head.{e}" for e in ("pdf", "svg", "png", "csv", "json")}
    assert sorted(os.listdir(tmp_path)) == sorted(p.name for p in paths.values())


def test_the_same_figure_gives_the_same_bytes(tmp_path):
    first = save_figure(figure(), "a", records=[record()], data=DATA, folder=tmp_path / "1")
    second = save_figure(figure(), "a", records=[record()], data=DATA, folder=tmp_path / "2")
    assert bytes_of(first) == bytes_of(second)


def test_another_process_gives_the_same_bytes(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_report as t;"
        f"t.save_figure(t.figure(), 'a', records=[t.record()], data=t.DATA, folder={str(tmp_path / '2')!r})"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"},
    )
    first = save_figure(figure(), "a", records=[record()], data=DATA, folder=tmp_path / "1")
    assert bytes_of(first) == {e: (tmp_path / "2" / f"a.{e}").read_bytes() for e in first}


def test_what_was_drawn_or_saved_before_does_not_matter(tmp_path):
    def two_panels():
        fig, axes = panels(1, 2, width=7)
        for ax in axes:
            plot_loss(DATA, ax)
        return fig

    fresh, used = two_panels(), two_panels()
    first = save_figure(fresh, "a", folder=tmp_path / "1")
    for dpi in (50, 111):
        used.savefig(tmp_path / "shown.png", dpi=dpi)
    for _ in range(2):
        assert bytes_of(save_figure(used, "a", folder=tmp_path / "2")) == bytes_of(first)


def test_the_users_own_settings_do_not_reach_the_files(tmp_path):
    first = bytes_of(save_figure(figure(), "a", folder=tmp_path))
    own = {
        "pdf.fonttype": 3,
        "svg.fonttype": "none",
        "svg.hashsalt": "x",
        "savefig.bbox": "tight",
        "savefig.facecolor": "k",
    }
    with matplotlib.rc_context(own):
        assert bytes_of(save_figure(figure(), "a", folder=tmp_path)) == first


def test_saving_changes_none_of_matplotlibs_settings(tmp_path):
    before = dict(matplotlib.rcParams)
    save_figure(figure(), "a", folder=tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_no_file_holds_a_date(tmp_path):
    files = bytes_of(save_figure(figure(), "a", records=[record()], data=DATA, folder=tmp_path))
    assert b"CreationDate" not in files["pdf"]
    assert b"ModDate" not in files["pdf"]
    assert b"<dc:date>" not in files["svg"]
    assert b"tIME" not in files["png"]


def test_the_pdf_embeds_truetype_and_the_svg_needs_no_font(tmp_path):
    files = bytes_of(save_figure(figure(), "a", folder=tmp_path))
    declared = fonts(files["pdf"])
    assert b"/FontFile2" in declared  # TrueType, PDF 32000-1:2008, table 126
    assert b"/Type3" not in declared
    assert b"<text" not in files["svg"]


def test_the_png_has_the_columns_width_in_pixels(tmp_path):
    png = save_figure(figure(), "a", folder=tmp_path)["png"].read_bytes()
    assert int.from_bytes(png[16:20], "big") == round(COLUMN * DPI)  # IHDR, https://www.w3.org/TR/png-3/#11IHDR


def test_the_csv_gives_the_table_back_exactly(tmp_path):
    path = save_figure(figure(), "a", data=DATA, folder=tmp_path)["csv"]
    pd.testing.assert_frame_equal(
        pd.read_csv(path), DATA.astype({"config_hash": "str"}), check_exact=True, check_dtype=False
    )


def test_a_named_index_is_part_of_the_csv(tmp_path):
    path = save_figure(figure(), "a", data=DATA.set_index("step"), folder=tmp_path)["csv"]
    assert path.read_text().startswith("step,config_hash,train_loss\n1,")


def test_without_data_there_is_no_csv_not_even_an_older_one(tmp_path):
    save_figure(figure(), "a", data=DATA, folder=tmp_path)
    assert "csv" not in save_figure(figure(), "a", folder=tmp_path)
    assert not (tmp_path / "a.csv").exists()


def test_provenance_holds_what_the_runs_share_once_and_what_differs_beside_each():
    origin = provenance([record(seed=1), record(seed=0)])
    assert origin["environment"] == {k: v for k, v in WORLD.items() if k != "seed"}
    assert [(r["config_hash"], r["status"], r["environment"]) for r in origin["runs"]] == [
        ("hash0", "finished", {"seed": 0}),
        ("hash1", "finished", {"seed": 1}),
    ]
    assert RunConfig.from_dict(origin["runs"][1]["config"]) == record(seed=1).config


def test_order_and_repetition_of_records_do_not_matter():
    assert provenance([record(1), record(0), record(1)]) == provenance(iter([record(0), record(1)]))


def test_dicts_are_records_too():
    assert provenance([record().to_dict()]) == provenance([record()])
    assert provenance([{"config_hash": "b", "status": "failed"}])["runs"] == [
        {"config_hash": "b", "status": "failed", "environment": {}, "config": None}
    ]


def test_provenance_names_no_folder_of_this_machine_and_no_date():
    run = RunConfig(data=DataConfig(corpus="/home/zoe/secret/text.txt"))
    world = {"root": r"C:\Users\zoe\x", "home": "~/zoe/y", "at": "2026-11-30T18:43:48+00:00", "day": "2026-11-30"}
    origin = provenance([record(config=run, environment=world)])
    assert "zoe" not in json.dumps(origin)
    assert origin["runs"][0]["config"]["data"]["corpus"] == "text.txt"
    assert origin["environment"] == {"root": "x", "home": "y"}


def test_a_number_that_is_not_finite_is_null_in_the_json(tmp_path):
    runs = [{"hash": "a", "status": "diverged", "environment": {"loss": math.nan}}]
    path = save_figure(figure(), "a", records=runs, folder=tmp_path)["json"]
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["environment"] == {"loss": None}


@pytest.mark.parametrize("name", ["", "a/b", "../a", "/a", "a\\b", ".", ".hidden", "a b", "head.pdf", "head.csv", None])
def test_a_name_that_is_no_plain_file_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="name="):
        save_figure(figure(), name, folder=tmp_path)
    assert not os.listdir(tmp_path)


def test_axes_are_no_figure_and_a_list_is_no_data(tmp_path):
    with pytest.raises(ValueError, match=r"Axes was given; allowed is a matplotlib Figure, as in ax\.figure"):
        save_figure(plot_loss(DATA), "a", folder=tmp_path)
    with pytest.raises(ValueError, match="list was given"):
        save_figure(figure(), "a", data=[1], folder=tmp_path)


def test_a_figure_that_cannot_be_drawn_leaves_the_older_files_as_they_were(tmp_path, monkeypatch):
    before = bytes_of(save_figure(figure(), "a", data=DATA, folder=tmp_path))
    broken = figure()
    broken.text(0.5, 0.5, "$\\notacommand$")
    with pytest.raises(ValueError, match="notacommand"):
        save_figure(broken, "a", folder=tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {f"a.{e}": b for e, b in before.items()}


def test_without_a_folder_figures_go_to_the_projects_reports(tmp_path, monkeypatch):
    monkeypatch.setenv("SANDBOX_HOME", str(tmp_path))
    assert save_figure(figure(), "a")["png"] == tmp_path / "reports" / "a.png"
