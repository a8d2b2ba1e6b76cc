"""Disjoint cores while there are enough; every worker gets something."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.placement import BadCores, BadGpus, parse_cores, place, usable_cores, visible_gpus


def names(count: int) -> list[str]:
    return [f"worker-{i}" for i in range(count)]


@given(workers=st.integers(1, 12), cores=st.integers(1, 64))
def test_cores_are_disjoint_and_even_while_there_are_enough(workers: int, cores: int) -> None:
    shares = place(names(workers), [1] * workers, range(cores), ()).cores
    taken = [core for share in shares for core in share]
    assert len(shares) == workers
    assert set(taken) <= set(range(cores))
    assert len({len(share) for share in shares}) == 1
    if workers <= cores:
        assert len(taken) == len(set(taken)) == cores // workers * workers
    else:
        assert max(map(taken.count, taken)) - min(map(taken.count, range(cores))) <= 1


def test_it_says_what_it_did() -> None:
    assert place(names(2), [1, 1], range(4), ()).summary == "each worker has 2 cores of its own"
    assert "4 workers share 2 cores" in place(names(4), [1, 1, 1, 1], range(2), ()).summary
    assert place(names(2), [1, 1], (), ()).cores == ((), ())
    assert "not pinned" in place(names(2), [1, 1], (), ()).summary


def test_gpus_are_dealt_in_turn_and_leave_the_cores_alone() -> None:
    placement = place(names(3), [1, 1, 1], range(8), ("0", "1"))
    assert placement.gpus == ("0", "1", "0")
    assert placement.cores == ((), (), ())


@given(ranks=st.lists(st.integers(1, 4), min_size=1, max_size=5), cores=st.integers(1, 40))
def test_ranks_have_equal_shares_of_the_cores(ranks: list[int], cores: int) -> None:
    shares = place(names(len(ranks)), ranks, range(cores), ()).cores
    each = cores // sum(ranks)
    if each:
        assert [len(share) for share in shares] == [each * n for n in ranks]
        assert len({core for share in shares for core in share}) == each * sum(ranks)
    else:
        assert [len(share) for share in shares] == [min(n, cores) for n in ranks]


def test_ranks_have_a_gpu_each() -> None:
    placement = place(names(3), [1, 2, 2], (), ("0", "1", "2", "3"))
    assert placement.gpus == ("0", "1,2", "3,0")
    with pytest.raises(BadGpus, match="2 ranks needs as many GPUs; there are 1"):
        place(names(2), [1, 2], (), ("0",))


def test_it_says_how_ranks_share() -> None:
    assert "each rank of a worker has 2 cores" in place(names(2), [1, 2], range(6), ()).summary
    assert "3 ranks of 2 workers share 2 cores" in place(names(2), [1, 2], range(2), ()).summary


def test_core_lists() -> None:
    assert parse_cores("0-2,8,1") == (0, 1, 2, 8)
    assert usable_cores("none") == ()
    assert usable_cores("auto")
    for text in ("", "x", "3-1", "-2", "1,,2"):
        with pytest.raises(BadCores, match="--cores"):
            parse_cores(text)
    with pytest.raises(BadCores, match="may not use"):
        usable_cores("99999")


def test_gpus_come_from_the_environment_and_only_if_wanted() -> None:
    assert visible_gpus("cpu", {"CUDA_VISIBLE_DEVICES": "0"}) == ()
    assert visible_gpus("auto", {"CUDA_VISIBLE_DEVICES": "2,GPU-a"}) == ("2", "GPU-a")
    assert visible_gpus("auto", {"CUDA_VISIBLE_DEVICES": ""}) == ()
