"""Optimizers on 2 and 4 real ranks (gloo) do what they do in one process; who is missing is named. Two launches."""

import pytest

from helpers.cases_optim import OPTIMIZERS
from helpers.ranks import run_ranks

ROUND_OFF = 1e-6  # float32, weights near 1: the same sums in other batches


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    """Return (number of ranks, answers of each rank)."""
    answers = run_ranks(tmp_path_factory.mktemp("ranks"), request.param, "helpers.cases_optim")["everything"]
    assert all(isinstance(answer, dict) for answer in answers), answers[0]
    return request.param, answers


def test_the_mesh_has_the_reference_names_and_is_closed_in_the_end(ranks):
    size, answers = ranks
    for answer in answers:
        assert answer["mesh"] == (("dp_replicate", "dp_shard"), (1, size))
        assert answer["closed"]


def test_sizes_that_do_not_multiply_to_the_ranks_are_one_error(ranks):
    size, answers = ranks
    assert answers[0]["wrong_size"].startswith(f"dp_replicate=1 x dp_shard={size + 1} = {size + 1} ranks were given")


@pytest.mark.parametrize("case", ["equivalence", "without_gradient"])
def test_every_optimizer_moves_the_weights_as_one_process_does(ranks, case):
    size, answers = ranks
    for answer in answers:
        assert {kind for kind, _ in answer[case]} == {"fsdp", "ddp"} | ({"hsdp"} if size == 4 else set())
        assert {name for _, name in answer[case]} == set(OPTIMIZERS)
        assert {key: diff for key, diff in answer[case].items() if not diff <= ROUND_OFF} == {}


def test_a_rank_without_gradient_makes_no_difference_to_replicas_and_counts_as_zero_in_shards(ranks):
    assert all(diff <= ROUND_OFF for answer in ranks[1] for diff in answer["one_rank_without_gradient"].values())


def test_an_optimizer_built_before_sharding_is_an_error(ranks):
    assert all("built before the model was sharded" in answer["nobody_has_a_gradient"] for answer in ranks[1])


def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_ranks_before_anything_changes(ranks):
    assert [answer["not_finite_on_one_rank"] for answer in ranks[1]] == [("NonFiniteGradient", True)] * ranks[0]


def test_dion2s_local_choice_moves_each_shards_largest_rows_and_sends_less(ranks):
    for answer in ranks[1]:
        assert answer["local_choice_by_hand"]
        assert answer["local_choice"]["moved"]
        assert answer["local_choice"]["finite"]
        assert answer["local_choice"]["cheap"] < 0.7 * answer["local_choice"]["costly"]


def test_state_on_each_rank_is_its_share(ranks):
    size, answers = ranks
    for answer in answers:
        assert answer["state_shrinks"] == dict.fromkeys(OPTIMIZERS, 1 / size)


def test_a_loaded_state_goes_on_bit_for_bit(ranks):
    assert all(answer["resume"] == dict.fromkeys(OPTIMIZERS, True) for answer in ranks[1])


def test_ranks_with_different_models_are_told_so(ranks):
    assert all("ranks [1] hold other parameters" in answer["other_models"] for answer in ranks[1])


def test_a_rank_that_does_not_come_is_named_within_the_time_allowed(ranks):
    size, answers = ranks
    for answer in answers[:-1]:
        kind, sentence, seconds = answer["somebody_is_missing"]
        assert kind == "RankMissing"
        assert sentence.startswith(f"rank {size - 1} took no part in")
        assert seconds < 8.5  # 2 s of time-out, 5 s in which the others make themselves known
