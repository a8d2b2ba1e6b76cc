"""Between the control plane's messages and what engine and fabric know: what a decode leg says."""

from decode_server.handoff import Installs
from engine.request import FirstToken, PromptLogprobs
from engine.request_message import token_logprobs
from kvfabric.ticket import ReceiveReport, Span, Ticket, around
from protos import serving_pb2 as pb


def ticket_message(ticket: Ticket, replaces_lost: bool) -> pb.KVTicket:
    return pb.KVTicket(
        transfer_id=ticket.transfer_id,
        shards=[
            pb.KVShard(
                address=shard.address,
                generation=shard.generation,
                first_head=shard.first_head,
                num_heads=shard.num_heads,
            )
            for shard in ticket.shards
        ],
        fingerprint=ticket.fingerprint,
        facts=ticket.facts,
        first_token=ticket.first_token,
        num_tokens=ticket.num_tokens,
        block_size=ticket.block_size,
        replaces_lost=replaces_lost,
        codecs=ticket.codecs,
    )


def prompt_logprobs_event(told: PromptLogprobs) -> pb.GenerateEvent:
    entries = [pb.TokenLogprobs(**entry._asdict()) for entry in told.logprobs]
    message = pb.PromptLogprobs(first_index=told.first_index, logprobs=entries)
    return pb.GenerateEvent(prompt_logprobs=message)


def first_token_of(message: pb.FirstToken) -> FirstToken:
    has_logprobs = message.HasField("logprobs")
    return FirstToken(message.token_id, token_logprobs(message.logprobs) if has_logprobs else None)


def note_installed(timings: pb.Timings, installs: Installs, report: ReceiveReport) -> None:
    """A transfer is committed. Ranks install beside each other: the slowest counts. `installs`
    are this process's, which is rank 0 of them."""
    own = Span(installs.begin_ns, installs.end_ns)
    each = [(installs.ns, own), *((its.install_ns, its.install) for its in report.ranks[1:])]
    timings.install_ns = max(ns for ns, _ in each)
    timings.install.begin_ns, timings.install.end_ns = around(span for _, span in each)
    timings.kv_nbytes += report.nbytes
    timings.kv_frames += report.frames
    del timings.ranks[:]
    for rank, (its, (ns, span)) in enumerate(zip(report.ranks, each, strict=False)):
        told = timings.ranks.add(rank=rank, kv_nbytes=its.nbytes, kv_frames=its.frames)
        told.install_ns, (told.install.begin_ns, told.install.end_ns) = ns, span
