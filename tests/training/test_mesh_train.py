"""One run on 1, 2 and 4 ranks gives one curve, and its checkpoints can be read at any of them. Four launches."""

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.cases_train import CROSSED, OPTIMIZERS
from helpers.ranks import run_ranks

CLOSE = 1e-5  # nats/token: another order of float32 sums, over 20 steps


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """Return {number of ranks: {case: [answer of each rank]}}; later launches find what earlier ones wrote."""
    home = tmp_path_factory.mktemp("launches")
    (home / "numbers.txt").write_text("".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(4000)))
    answers = {"home": home}
    for size in (4, 1, 2):
        (home / f"ranks{size}").mkdir()
        answers[size] = run_ranks(home / f"ranks{size}", size, "helpers.cases_train")
    (home / "resumed").mkdir()
    answers["resumed"] = run_ranks(home / "resumed", 4, "helpers.cases_resume")
    return answers


def of(launches, size, case):
    """Return the answers of all ranks, none of which may be a traceback."""
    answers = launches[size]["everything"]
    assert all(isinstance(answer, dict) for answer in answers), answers[0]
    return [answer[case] for answer in answers]


@pytest.mark.parametrize("name", OPTIMIZERS | CROSSED)
@pytest.mark.parametrize(("size", "kind"), [(2, "ddp"), (2, "fsdp"), (4, "ddp"), (4, "fsdp"), (4, "hsdp")])
def test_the_curve_is_that_of_one_process(launches, size, kind, name):
    train, val, rms = of(launches, 1, "curves")[0]["alone", name]
    for answer in of(launches, size, "curves"):
        here = answer[kind, name]
        np.testing.assert_allclose(here[0], train, rtol=0, atol=CLOSE)
        np.testing.assert_allclose(here[1], val, rtol=0, atol=CLOSE)
        assert here[2]["role"] == rms["role"]
        for column in ("weight", "gradient"):
            np.testing.assert_allclose(here[2][column], rms[column], rtol=2e-3)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_sees_the_same_curve(launches, size):
    first, *others = of(launches, size, "curves")
    for other in others:
        assert {key: value[:2] for key, value in other.items()} == {key: value[:2] for key, value in first.items()}


def test_a_mesh_of_one_process_changes_no_bit(launches):
    assert of(launches, 1, "mesh_of_one") == [True]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not list a process's threads")
@pytest.mark.parametrize("size", [2, 4])
def test_no_thread_of_gloo_is_left_when_python_shuts_down(launches, size):
    assert all(of(launches, size, "closes"))
    for rank in range(size):
        names = json.loads((launches["home"] / f"ranks{size}" / f"threads{rank}.json").read_text())
        assert [name for name in names if "gloo" in name] == []
        assert any("python" in name for name in names)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_going_on_from_a_checkpoint_is_the_straight_run_bit_for_bit(launches, size):
    for answer in of(launches, size, "checkpoints"):
        assert answer == dict.fromkeys(answer, (["step-00000008", "step-00000016"], 4, True))


@pytest.mark.parametrize(("size", "written"), [(1, 4), (2, 4), (2, 1), (4, 1), (4, 2)])
def test_a_checkpoint_goes_on_at_another_number_of_ranks(launches, size, written):
    straight = of(launches, 1, "curves")[0]
    for answer in launches["resumed"]["resumed"] if size == 4 else of(launches, size, "other_sizes"):
        assert isinstance(answer, dict), answer
        for name in ("normuon-lion", "dion-lion", "adamw"):
            steps, losses = answer[name, written]
            assert steps == 4
            np.testing.assert_allclose(losses, straight["alone", name][0], rtol=0, atol=20 * CLOSE)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_newest_checkpoint_that_is_complete_and_readable_is_used(launches, size):
    assert of(launches, size, "cut_off") == [(8, True)] * size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_full_disk_is_an_error_on_every_rank_and_earlier_checkpoints_are_intact(launches, size):
    for told, left, rest, status in of(launches, size, "full_disk"):
        assert "step-00000012 was not written" in told
        assert left == ["step-00000006"]
        assert (rest, status) == (14, "finished")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_folder_of_another_run_is_refused(launches, size):
    assert all("is of another run (run)" in answer for answer in of(launches, size, "foreign"))


@pytest.mark.parametrize("size", [2, 4])
def test_the_plan_is_what_is_held_and_sent_to_the_byte(launches, size):
    for answer in of(launches, size, "plans"):
        assert {key: value for key, value in answer.items() if not value[0] or value[1] != value[2]} == {}
        assert all(value[1] > 0 for (_, name), value in answer.items() if name != "adamw")


@pytest.mark.parametrize("size", [2, 4])
def test_a_batch_that_does_not_divide_by_the_ranks_is_an_error(launches, size):
    assert all(f"batch_size={size + 1} was given for {size} ranks" in a for a in of(launches, size, "bad_batch"))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_diverged_run_is_the_same_record_on_every_rank(launches, size):
    answers = of(launches, size, "diverges_alike")
    assert answers[0][0] == "diverged"
    assert set(answers) == {answers[0]}
