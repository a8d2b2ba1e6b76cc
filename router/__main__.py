"""`python -m router`: flags to objects, and run."""

import gc
import signal
import sys
from pathlib import Path

from router.admin_server import NoToken, read_token
from router.app import build_app
from router.config import RouterConfig
from router.cors import BadOrigin, check_origins
from router.http_tls import BadHttpTLS, HttpTLS
from router.key_source import KeySource
from router.keys import BadKeys
from router.server import RouterServer
from router.tokenizer import TextTokenizer, UnusableModelFolder
from runtime import log
from runtime.flags import parse
from runtime.metrics import new_registry
from runtime.tls import TLS, BadTLS

DESCRIPTION = """\
Baton's router: OpenAI's API in front of prefill and decode workers. It speaks HTTP to clients and
gRPC to workers, turns text into tokens and back, and sends each prompt where it is quickest.
Start the workers first or later, in any order: /readyz says when there is a pair.
Example: python -m router --model-path FOLDER --served-model-name smollm2 --decode 127.0.0.1:7100
--prefill 127.0.0.1:7000. Each flag can also be set as BATON_<FLAG> in the environment.
"""


def main() -> None:
    config = parse(RouterConfig, prog="python -m router", description=DESCRIPTION)
    log.configure("router", format=config.log_format, level=config.log_level)
    if not config.decode:
        sys.exit("python -m router: no decode worker: give at least one with --decode host:port")
    if not config.prefill and config.mode == "disaggregated":
        sys.exit(
            "python -m router: no prefill worker: give at least one with --prefill host:port, "
            "or say --mode colocated"
        )
    try:
        tokenizer = TextTokenizer.from_folder(Path(config.model_path))
        TLS.from_files(config.tls_cert, config.tls_key, config.tls_ca)  # or say now what is wrong
        http_tls = HttpTLS.from_files(config.http_tls_cert, config.http_tls_key)
        check_origins(config.cors_origin)
        read_token(config)
        KeySource.from_config(config)
    except (UnusableModelFolder, BadTLS, BadHttpTLS, BadOrigin, NoToken, BadKeys) as error:
        sys.exit(f"python -m router: {error}")
    # uvicorn hands the signal that ended it on to these: an end that was asked for is a good one.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: sys.exit(0))
    app = build_app(config, tokenizer, new_registry())

    def reload_keys(*_: object) -> None:
        if (router := getattr(app.state, "router", None)) is not None:
            router.admission.keys.reload_soon()

    signal.signal(signal.SIGHUP, reload_keys)
    server = RouterServer(
        app,
        host=config.host,
        port=config.port,
        grace_s=config.shutdown_grace_s,
        head_timeout_s=config.head_timeout_s,
        send_timeout_s=config.send_timeout_s,
        tls=http_tls,
    )
    gc.freeze()  # modules and vocabulary stay: a collection that walks them holds up every token
    server.run()
    if not server.started:
        sys.exit(1)


if __name__ == "__main__":
    main()
