"""The decode worker's gRPC service around an engine and the receiving end of the fabric."""

from decode_server.service import add_services

__all__ = ["add_services"]
