"""The prefill worker's gRPC service around an engine and the sending end of the fabric."""

from prefill_server.service import add_services

__all__ = ["add_services"]
