"""Waits until a cluster that was just started answers. Asks again ten times a second: this is the
start of the cluster, no request waits here."""

import asyncio
from contextlib import suppress

import httpx

from deploy.plan import Plan

_PAUSE_S = 0.1


async def until_ready(made: Plan) -> None:
    """Returns when every worker accepts calls and the router says it can serve."""
    for spec in made.specs:
        if "grpc" in spec.addresses:
            await _until_accepting(spec.addresses["grpc"])
    async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
        await _until_serving(client, made.url)


async def _until_accepting(address: str) -> None:
    host, _, port = address.rpartition(":")
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            await asyncio.sleep(_PAUSE_S)
        else:
            writer.close()
            return


async def _until_serving(client: httpx.AsyncClient, url: str) -> None:
    while True:
        with suppress(httpx.TransportError):
            if (await client.get(f"{url}/readyz")).status_code == httpx.codes.OK:
                return
        await asyncio.sleep(_PAUSE_S)
