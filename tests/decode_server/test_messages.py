from decode_server.handoff import Installs
from decode_server.messages import note_installed
from kvfabric.ticket import ReceiveReport, Span
from protos import serving_pb2 as pb

INSTALLS = Installs(ns=7, begin_ns=100, end_ns=150)


def test_what_one_process_installed() -> None:
    timings = pb.Timings()
    note_installed(timings, INSTALLS, ReceiveReport(9, 60, 4096, 3, Span(110, 150)))
    assert (timings.install_ns, timings.kv_nbytes, timings.kv_frames) == (7, 4096, 3)
    assert (timings.install.begin_ns, timings.install.end_ns) == (100, 150)
    assert not timings.ranks


def test_of_several_ranks_the_slowest_counts_and_each_is_told() -> None:
    """Rank 0's copies are known by this process, those of lost transfers before included."""
    ranks = (
        ReceiveReport(3, 60, 4096, 3, Span(110, 150)),
        ReceiveReport(20, 60, 2048, 2, Span(120, 190)),
    )
    whole = ReceiveReport(20, 60, 6144, 5, Span(110, 190), ranks)
    timings = pb.Timings()
    note_installed(timings, INSTALLS, whole)
    note_installed(timings, INSTALLS, whole)
    assert (timings.install_ns, timings.kv_nbytes, timings.kv_frames) == (20, 2 * 6144, 10)
    assert (timings.install.begin_ns, timings.install.end_ns) == (100, 190)
    assert [(its.rank, its.install_ns, its.install.begin_ns, its.kv_nbytes)
            for its in timings.ranks] == [(0, 7, 100, 4096), (1, 20, 120, 2048)]  # fmt: skip
