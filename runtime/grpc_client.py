"""Channels to other processes of the cluster.

The keepalive notices within ten seconds a peer that vanished without closing its connection; a
peer that is restarted on the same port is found again within one.
"""

import grpc

from runtime.tls import TLS

KEEPALIVE_S = 5.0
"""A silent connection is pinged after this long, and given up when the ping gets no answer for
as long again. The server keeps the same rule."""

MAX_MESSAGE_NBYTES = 64 << 20
"""Holds any prompt of token ids; KV never travels over gRPC."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
    # The deadline that really counts for the ping's answer; a minute, unless told.
    ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
    # The cluster's own addresses are never behind the user's web proxy.
    ("grpc.enable_http_proxy", 0),
)


def open_channel(target: str, tls: TLS | None = None) -> grpc.aio.Channel:
    """A channel to `host:port`; it connects with the first call, and the caller closes it."""
    if tls is None:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    return grpc.aio.secure_channel(target, tls.channel_credentials(), options=_OPTIONS)
