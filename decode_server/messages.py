"""Between the control plane's messages and what engine and fabric know: what a decode leg says."""

from engine.request import FirstToken, PromptLogprobs
from engine.request_message import token_logprobs
from kvfabric.ticket import Ticket
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
